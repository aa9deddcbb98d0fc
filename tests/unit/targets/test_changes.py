"""Weights and modules of a model that change: steps compute the model as it is when a text begins."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration

from changing import WRITES, by_adding, by_fused_optimiser, by_load_state_dict, by_new_data, made
from outpace.core import OutpaceError, UnsupportedModel
from outpace.native.layers import functions
from outpace.targets import CausalTarget, Rows, Target
from outpace.targets.batch import Batch, Building
from outpace.targets.cpu.kernels import COMPILED, KERNELS, QUANTISED
from outpace.targets.cpu.trials import why_unavailable
from outpace.targets.gpu.graphs import Eager
from outpace.targets.inputs.changes import Addresses, Structure, WatchedWeights, sample
from outpace.targets.kernel import Kernel
from outpace.targets.step import plans

PROMPT = [3, 6, 7, 11]
NAMED = [
    pytest.param(kernel, dtype, id=f"{kernel.name.replace(' ', '_')}-{str(dtype)[6:]}")
    for kernel in (*KERNELS, *QUANTISED.values())
    for dtype in (torch.float32, torch.bfloat16)
    if dtype in kernel.dtypes
]
WEIGHTS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.v_proj.bias",
    "model.layers.0.self_attn.k_norm.weight",
    "model.layers.0.self_attn.o_proj.bias",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
FUSED = not isinstance(functions(torch.float32), str)


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``target`` exchanges is put back."""
    monkeypatch.setattr(plans, "chosen_kernel", plans.chosen_kernel)


def target(model: Any, kernel: Kernel, fused: bool, exact: bool, **more: Any) -> CausalTarget:
    """A target whose linear layers all use a kernel."""
    if why := why_unavailable(kernel, model.dtype):
        pytest.skip(f"{kernel.name} is not available here: {why}")
    if fused and isinstance(why := functions(model.dtype), str):
        pytest.skip(why)
    if fused and not (kernel.rounds or kernel is COMPILED):
        pytest.skip("native forwards have kernels of their own")
    if kernel.rounds:
        more = {**more, "quantise": kernel.name}
    plan = "native" if fused else "exact" if exact else "packed" if kernel.copies else "stock"
    plans.chosen_kernel = lambda _: kernel  # type: ignore[assignment]  # where another is faster, too
    try:
        of = CausalTarget(model, check=False, plan=plan, **more)
    except UnsupportedModel as error:
        pytest.skip(str(error))
    if exact and not fused and kernel.name not in of.plan.packed:
        pytest.skip("exact steps have another kernel here")
    assert of.plan.native == fused and (kernel.name in of.plan.packed) == kernel.copies
    return of


def logits(of: Any) -> Tensor:
    cache = of.new_cache(length=16)
    slot = cache.allocate()
    found: Tensor = of.forward(cache, Batch.of({slot: PROMPT})).logits_of(slot).clone()
    return found


def cases() -> list[Any]:
    """Each kernel and dtype with one of the first two ways; with the others as slow tests."""
    ways = {
        "stock": (False, False),
        "native": (True, True),
        "exact": (False, True),
    }
    return [
        pytest.param(
            *named.values, *flags, id=f"{named.id}-{way}", marks=() if way == chosen else pytest.mark.slow
        )
        for named, chosen in zip(NAMED, itertools.cycle(("stock", "native")), strict=False)
        for way, flags in ways.items()
    ]


@pytest.mark.parametrize(("kernel", "dtype", "fused", "exact"), cases())
def test_a_write_of_any_kind_to_any_weight_takes_effect(
    kernel: Kernel, dtype: torch.dtype, fused: bool, exact: bool
) -> None:
    """Three kinds per weight; each kind meets a matrix, a bias and a norm."""
    model = made(dtype)
    of = target(model, kernel, fused, exact)
    begun = {name: weight.clone() for name, weight in model.state_dict().items()}
    last, kinds, missed = logits(of), itertools.cycle(WRITES), []
    for name, write in [(name, next(kinds)) for name in WEIGHTS for _ in range(3)]:
        write(model, name)
        found, expected = logits(of), logits(target(model, kernel, fused, exact))
        if not torch.equal(found, expected) or torch.equal(found, last):
            missed.append(f"{write.__name__}: {name}")
        model.load_state_dict(begun)  # which is counted
        last = logits(of)
    assert not missed


@pytest.mark.skipif(not FUSED, reason="nothing is compiled here")
def test_every_weight_that_a_step_reads_from_a_tensor_of_its_own_is_watched() -> None:
    """All weights are tried one after the other, since a list would miss what a new kernel holds."""
    for plan in ("native", "exact", "packed", "stock"):
        model = made(torch.float32)
        of = CausalTarget(model, check=False, plan=plan)
        for name, weight in model.named_parameters():
            before = logits(of)
            weight.data = weight.detach() * 1.5  # the former memory stays as it was
            found = logits(of)
            assert torch.equal(found, logits(CausalTarget(model, check=False, plan=plan))), name
            # A bias of keys moves all scores alike.
            assert "k_proj.bias" in name or not torch.equal(found, before), name


def test_a_sample_has_all_of_a_vector_and_passes_through_all_columns_of_a_matrix() -> None:
    assert len(sample(torch.zeros(777))) == len(sample(torch.zeros(777, 1))) == 777
    for shape in ((576, 576), (1536, 576), (576, 1536), (49152, 576), (64, 4096), (8, 64, 96)):
        whole = torch.zeros(shape, dtype=torch.bfloat16)
        found = sample(whole)
        assert whole.numel() / 8192 <= len(found) and 64 <= len(found) <= max(130, 1.1 * whole.numel() / 8192)
        places = (found.data_ptr() - whole.data_ptr()) // 2 + found.stride(0) * torch.arange(len(found))
        assert int(places.max()) < whole.numel()
        columns = set((places % shape[-1]).tolist())
        assert len(columns) == min(len(found), shape[-1])
    assert len(sample(torch.randn(96, 64).t())) == len(sample(torch.randn(96, 64)))
    assert len(sample(torch.randn(96, 640)[:, :64])) >= 64
    assert len(sample(torch.randn(64, 1).expand(64, 96))) == 64 and len(sample(torch.tensor(1.0))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_writes_that_are_not_counted_are_seen_by_the_values(dtype: torch.dtype) -> None:
    layer = nn.Linear(96, 64).to(dtype)
    watched = WatchedWeights([layer])
    assert not watched.changed(thorough=True)
    layer.bias.data[5] += 1
    assert watched.changed(thorough=True) and not watched.changed(thorough=False)
    watched = WatchedWeights([layer])
    layer.weight.data.neg_()
    assert watched.changed(thorough=True) and not watched.changed(thorough=False)
    watched = WatchedWeights([layer])
    layer.weight.data[layer.weight.isnan()] = 0
    assert not watched.changed(thorough=True)
    layer.weight.data.fill_(float("nan"))
    assert not (watched := WatchedWeights([layer])).changed(thorough=True)  # bits, since NaN is unlike itself


def test_weights_made_in_inference_mode_and_others_without_memory_can_be_watched() -> None:
    with torch.inference_mode():
        layer = nn.Linear(96, 64)
    layer.released = nn.Parameter(torch.empty(4, 4, device="meta"))
    layer.complex = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex128))
    watched = WatchedWeights([layer])
    assert not watched.changed(thorough=True)
    with torch.inference_mode():
        assert not watched.changed(thorough=True)
        layer.weight.neg_()  # not counted there
        assert watched.changed(thorough=True) and not watched.changed(thorough=False)


def test_other_memory_another_shape_and_a_bias_that_was_none_are_seen() -> None:
    layer = nn.Linear(64, 64, bias=False)
    places = Addresses([layer])
    layer.weight.data = layer.weight.data.t()  # at the same address
    assert places.moved()
    places = Addresses([layer])
    layer.bias = nn.Parameter(torch.zeros(64))
    assert places.moved()
    places = Addresses([layer])
    layer.weight.data.neg_()
    assert not places.moved()


def test_a_write_that_the_sample_misses_is_for_renew() -> None:
    model = made(torch.bfloat16)
    of = CausalTarget(model, check=False, quantise="int8", plan="exact")
    weight = model.lm_head.weight
    watched = WatchedWeights([model.lm_head])
    row = next(
        place
        for place in range(112)
        if not (weight.data[place].neg_(), watched.changed(thorough=True), weight.data[place].neg_())[1]
    )
    before = logits(of)
    weight.data[row].neg_()
    assert torch.equal(logits(of), before)  # as the documentation says
    of.renew()
    after = logits(of)
    assert torch.equal(after, logits(CausalTarget(model, check=False, quantise="int8", plan="exact")))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("write", [by_fused_optimiser, by_adding, by_load_state_dict, by_new_data])
def test_a_part_and_a_target_of_released_weights_refuse_what_they_cannot_follow(write: Any) -> None:
    model = made(torch.bfloat16, layers=2)
    of = CausalTarget(model, check=False, quantise="int8")
    assert of.release()
    logits(of)
    write(model, "lm_head.weight")
    with pytest.raises(OutpaceError, match="make a new target and engine"):
        logits(of)
    model = made(torch.bfloat16, layers=2)
    of = CausalTarget(model, check=False, quantise="int8")
    part = of.some_layers([0])
    write(model, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(OutpaceError, match="make a new target and engine"):
        logits(part)
    assert torch.equal(logits(of), logits(CausalTarget(model, check=False, quantise="int8")))


def replace_a_module(model: Any) -> None:
    model.model.layers[0].mlp.down_proj = nn.Linear(96, 64, bias=False)


def wrap_a_module(model: Any) -> None:
    own = model.model.layers[0].mlp
    own.down_proj = nn.Sequential(own.down_proj, nn.Tanh())


def drop_a_layer(model: Any) -> None:
    del model.model.layers[1]


def add_a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, output: output * 2)


def add_a_hook_before(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, given: (given[0] * 2 + 1,))


def give_a_forward(model: Any) -> None:
    model.model.layers[0].mlp.forward = lambda states: states


REPLACEMENTS = [
    replace_a_module,
    wrap_a_module,
    drop_a_layer,
    add_a_hook,
    add_a_hook_before,
    give_a_forward,
]


@pytest.mark.parametrize("change", REPLACEMENTS)
@pytest.mark.parametrize("fused", [False, True], ids=["stock", "native"])
def test_modules_that_are_replaced_wrapped_or_hooked_are_refused(change: Any, fused: bool) -> None:
    model = made(torch.float32, layers=2)
    of = target(model, KERNELS[1], fused, True)
    logits(of)
    model(torch.tensor([PROMPT]), output_hidden_states=True)  # transformers' own hooks change nothing
    logits(of)
    change(model)
    with pytest.raises(OutpaceError, match=r"replaced, wrapped or given hooks .* new target and engine"):
        logits(of)


@pytest.mark.parametrize("change", REPLACEMENTS)
def test_a_target_that_runs_the_model_itself_follows_its_modules(change: Any) -> None:
    model = made(torch.float64, layers=2)
    of = CausalTarget(model, check=False)
    before = logits(of)
    change(model)
    model.double()
    logits(of)
    model.model.norm.weight = nn.Parameter(2 * model.model.norm.weight)  # nor is anything else held
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert torch.equal(logits(of), expected) and not torch.equal(expected, before)
    cache = of.new_cache(2)
    slots = [cache.allocate(), cache.allocate()]
    building = Building()
    building.add(slots[0], Rows([5] * 70), read=69)
    building.add(slots[1], Rows(PROMPT))
    found = of.forward(cache, building.made())
    assert torch.allclose(found.logits_of(slots[1]), expected, atol=1e-9)


def test_a_converted_model_is_refused_whether_weights_are_held_or_not() -> None:
    model = made(torch.float64)
    of = CausalTarget(model, check=False)
    logits(of)
    model.float()
    with pytest.raises(OutpaceError, match=r"float32 on cpu, but this target was made for torch\.float64"):
        logits(of)


def test_hooks_that_are_there_are_not_passed_by_when_layers_are_fused() -> None:
    for part in ("model", "model.layers.0", "model.layers.0.mlp", "model.norm"):
        model = made(torch.float32)
        model.get_submodule(part).register_forward_pre_hook(lambda module, given: None)
        assert CausalTarget(model, check=False).plan.why_not("native") == "modules in it have hooks"
    model = made(torch.float32)
    model(torch.tensor([PROMPT]), output_hidden_states=True)
    assert not Structure(model).changed()
    assert CausalTarget(model, check=False).plan.native == FUSED


class Captured(Eager):
    """A runner that, as a graph, reads weights at the addresses they had when it was made."""

    def __init__(self, model: Any) -> None:
        self.captures, self.model = 0, model

    def capture(self, forward: Any) -> Any:
        self.captures += 1
        return forward


def test_forwards_of_fixed_shapes_are_captured_again_when_weights_have_other_memory() -> None:
    model = made(torch.float32)
    runner = Captured(model)
    of = CausalTarget(model, static=True, runner=runner, check=False, plan="stock")
    cache = of.new_cache(2, 32)
    counts = []
    for write in (None, None, by_new_data, by_adding):
        if write is not None:
            write(model, "model.embed_tokens.weight")
        slot = cache.allocate()
        of.forward(cache, Batch.of({slot: PROMPT}))
        cache.free(slot)
        counts.append(runner.captures)
    assert counts == [1, 1, 2, 2]  # a graph reads the memory anew


def test_an_encoder_that_is_replaced_is_refused() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    model = BartForConditionalGeneration(BartConfig(**sizes, encoder_layers=1, decoder_layers=1)).eval()
    of: Any = Target(model)
    cache = of.new_cache()
    cache.free(of.open(cache, of.encode([5, 6])))
    model.model.encoder.layers[0].fc1 = nn.Linear(32, 32)
    with pytest.raises(OutpaceError, match="new target and engine"):
        of.open(cache, of.encode([5, 6]))

"""Bit-exact steps and packed weights: the same bits for a row among any others."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

import outpace
from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget, Rows, Target
from outpace.targets.batch import Batch
from outpace.targets.cpu import exact_attention as attention
from outpace.targets.cpu import kernels, trials
from outpace.targets.cpu.exact_attention import exact_attention
from outpace.targets.cpu.kernels import COMPILED, KERNELS, QUANTISED, STOCK, HalfFBGEMM
from outpace.targets.cpu.linear import Linear, Packer, piecewise
from outpace.targets.cpu.trials import chosen_kernel, row_step, using_threads, why_unavailable
from outpace.targets.kernel import StockKernel
from parts import first
from paths import random_tree

HALF = HalfFBGEMM()


def half_is_here() -> bool:
    return any(isinstance(kernel, HalfFBGEMM) for kernel in available(torch.bfloat16))


@cache
def available(dtype: torch.dtype) -> list[Any]:
    """Kernels that this machine has for a dtype."""
    return [kernel for kernel in KERNELS if dtype in kernel.dtypes and not why_unavailable(kernel, dtype)]


# -- attention ----------------------------------------------------------------------------


def states(
    context: int, size: int, dtype: torch.dtype, head: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """Queries of a tree, keys and values, the tree's mask, and its paths."""
    generator = torch.Generator().manual_seed(context)
    query = torch.randn(1, 6, size, head, generator=generator).to(dtype)
    keys, values = (torch.randn(1, 2, context + size, head, generator=generator).to(dtype) for _ in range(2))
    _, paths = random_tree(size, context)
    mask = torch.zeros(1, 1, size, context + size, dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[0, 0, node, [*range(context), *(context + one for one in path)]] = True
    return query, keys, values, mask, paths


@pytest.fixture(params=["in C", "in torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled function, where there is one, and without it."""
    if request.param == "in torch":
        monkeypatch.setattr(attention, "compiled_takes", lambda *_: False)


FORMS = pytest.mark.usefixtures("form")


def attend(*arguments: Any) -> Tensor:
    with torch.inference_mode():
        return exact_attention(nn.Identity(), *arguments)[0]


@FORMS
@pytest.mark.parametrize("head", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("context", [3, 187, 1100])
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(context: int, dtype: torch.dtype, head: int) -> None:
    """With three threads those of one."""
    query, keys, values, mask, paths = states(context, 13, dtype, head)
    with using_threads(3):
        found = attend(query, keys, values, mask)
    for node, path in enumerate(paths):
        columns = [*range(context), *(context + one for one in path)]
        alone = attend(query[:, :, node : node + 1], keys[:, :, columns], values[:, :, columns], None)
        assert torch.equal(alone[:, 0], found[:, node])


def test_scores_that_need_much_room_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "compiled_takes", lambda *_: False)
    for context in (61, 440):
        arguments = states(context, 13, torch.float32)[:4]
        whole = attend(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_ROOM", 5000)
            assert torch.equal(attend(*arguments), whole)


HEADS = pytest.mark.parametrize("head", [16, 64])  # the function in C takes the first with zeros behind it


@FORMS
@HEADS
@pytest.mark.parametrize("context", [3, 200, 440])
def test_attention_is_that_of_scaled_dot_products(context: int, head: int) -> None:
    query, keys, values, mask, _ = states(context, 13, torch.float32, head)
    wide = [one.double().repeat_interleave(3, dim=1) for one in (keys, values)]
    expected = nn.functional.scaled_dot_product_attention(query.double(), *wide, attn_mask=mask)
    assert (attend(query, keys, values, mask) - expected.transpose(1, 2)).abs().max() < 1e-5


@FORMS
@HEADS
def test_sequences_of_several_lengths_do_not_see_each_other(head: int) -> None:
    """Padded rows, which attend to column 0 alone, and columns beyond a sequence's own change nothing."""
    long, short = states(300, 5, torch.float32, head), states(40, 5, torch.float32, head)
    columns = long[1].shape[2]
    pad = nn.functional.pad
    query = torch.cat([long[0], short[0]])
    keys, values = (
        torch.cat([one, pad(two, (0, 0, 0, columns - two.shape[2]), value=3.0)])
        for one, two in zip(long[1:3], short[1:3], strict=True)
    )
    mask = torch.cat([long[3], pad(short[3], (0, columns - short[3].shape[3]))])
    mask[0, 0, 4] = False
    mask[0, 0, 4, 0] = True
    found = attend(query, keys, values, mask)
    assert torch.equal(found[0, :4], attend(*long[:4])[0, :4])
    assert torch.equal(found[1], attend(*short[:4])[0])
    assert found.isfinite().all()


@FORMS
@HEADS
def test_a_prompt_in_chunks_has_the_bits_of_a_whole_one(head: int) -> None:
    query, keys, values, _, _ = states(0, 330, torch.float32, head)
    whole = attend(query, keys, values, None)
    for start, stop in ((0, 100), (100, 101), (101, 330)):
        mask = torch.ones(stop - start, stop, dtype=torch.bool).tril(start)[None, None]
        part = attend(query[:, :, start:stop], keys[:, :, :stop], values[:, :, :stop], mask)
        assert torch.equal(part, whole[:, start:stop])


@FORMS
@HEADS
def test_rows_of_padding_change_nothing_where_they_are_more_than_the_columns(head: int) -> None:
    query, keys, values, mask, _ = states(3, 5, torch.float32, head)
    padded = nn.functional.pad(query, (0, 0, 0, 11))
    rows = torch.cat([mask, mask[:, :, :1].expand(-1, -1, 11, -1)], dim=2)
    found = attend(padded, keys, values, rows)
    assert torch.equal(found[:, :5], attend(query, keys, values, mask))


@FORMS
def test_values_of_another_size_than_keys() -> None:
    """As those of multi-head latent attention."""
    query, keys, values, mask, _ = states(61, 5, torch.float32, 48)
    found = attend(query, keys, values[..., :20], mask)
    assert torch.equal(found, attend(query, keys, values, mask)[..., :20])


def test_keys_and_values_that_are_laid_out_in_another_way_give_the_same_bits() -> None:
    """A head's rows apart from each other, and keys and values with other strides."""
    query, keys, values, mask, _ = states(200, 13, torch.float32, 64)
    whole = attend(query, keys, values, mask)
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    longer = nn.functional.pad(values, (0, 0, 0, 7))[:, :, :-7]
    assert torch.equal(attend(query, turned, values, mask), whole)
    assert torch.equal(attend(query, keys, longer, mask), whole)


def test_attention_refuses_what_it_does_not_compute() -> None:
    with pytest.raises(UnsupportedModel, match="softcap"), torch.inference_mode():
        exact_attention(nn.Identity(), *states(3, 5, torch.float32)[:4], softcap=50.0)


# -- kernels ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layers_give_a_row_the_same_bits_among_any_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(96, 40).to(dtype).requires_grad_(False)
    rows = torch.randn(70, 96, generator=generator).to(dtype)
    for kernel in available(dtype):
        try:
            step = row_step(kernel, dtype, 96, 40)
        except UnsupportedModel:  # MKL's on some processors; ours never
            assert kernel.name != "compiled"
            continue
        packed = Linear(layer, kernel, kernel.pack(layer.weight), step)
        with torch.inference_mode():
            whole = packed(rows)
            wide = nn.functional.linear(rows.double(), layer.weight.double(), layer.bias.double())
            assert (whole - wide).abs().max() <= 8 * wide.abs().max() * torch.finfo(dtype).eps
            for count in (1, 2, 3, 5, 7, 14, 31, 32):
                assert torch.equal(packed(rows[None, :count])[0], whole[:count]), (kernel.name, count)


class Counting(StockKernel):
    """A kernel that notes how many rows it multiplies."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        self.rows.append(len(rows))
        return super().multiply(rows, packed, bias)


def test_rows_are_padded_to_the_step_of_a_kernel() -> None:
    layer, kernel = nn.Linear(8, 4), Counting()
    packed = Linear(layer, kernel, layer.weight, 4)
    for count in (1, 2, 3, 4, 7, 9):
        rows = torch.ones(count, 8)
        assert torch.allclose(packed(rows), layer(rows))
    assert kernel.rows == [4, 4, 4, 4, 8, 12]


class Doubled(StockKernel):
    """A kernel whose results differ clearly from the stock layer's."""

    copies = True

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        return 2 * super().multiply(rows, packed, bias)


@pytest.mark.parametrize("exact", [False, True])
def test_a_single_row_goes_to_the_stock_layer_where_that_is_faster(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a bit-exact target, whose rows have one kernel's bits."""
    monkeypatch.setattr("outpace.targets.cpu.linear.chosen_kernel", lambda _: Doubled())
    monkeypatch.setattr("outpace.targets.cpu.linear.COMPILED", Doubled())
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    packed = Packer(model, pack=True, exact=exact)(model[0])
    assert packed is not None
    rows, stock = torch.randn(2, 1, 32), model[0]
    with torch.inference_mode():
        single = packed(rows[:1])
        assert torch.equal(single, stock(rows[:1])) is not exact
        assert torch.allclose(packed(rows), 2 * stock(rows), atol=1e-5)


def in_parts(rows: Tensor, weight: Tensor, parts: int = 1) -> Tensor:
    """Products as sums of this many parts, each of which is rounded once.

    Sums of integers in float64 are exact in any order, so that no library decides on the bits of a part.
    """
    whole = [(one.double() * 1024).round().chunk(parts, dim=1) for one in (rows, weight)]
    sums = [(part @ own.T / 2**20).to(rows.dtype) for part, own in zip(*whole, strict=True)]
    return torch.stack(sums).sum(dim=0)


class Exactly(StockKernel):
    """A kernel whose rows do not see each other on any processor."""

    copies = True

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        return in_parts(rows, packed)


class Leaky(Exactly):
    """A kernel that gives a row other bits among other rows."""

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        return super().multiply(rows, packed, bias) + len(rows) * 1e-3


def test_a_kernel_whose_rows_see_each_other_is_found_out() -> None:
    assert row_step(Exactly(), torch.float32, 32) == 1
    with pytest.raises(UnsupportedModel, match="depend on the other rows"):
        row_step(Leaky(), torch.float32, 32)


def test_a_single_row_whose_sum_is_split_is_found_out_in_a_half_dtype() -> None:
    """Rounding hides the order of most sums: libraries split those of a single row with many inputs."""

    class Split(Exactly):
        def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
            return in_parts(rows, packed, parts=3 if len(rows) == 1 else 1)

    assert row_step(Split(), torch.bfloat16, 1024) == 2


class ByThreads(Exactly):
    """Sums in as many parts as there are threads, if there are this many rows."""

    def __init__(self, fewest: int) -> None:
        self.fewest = fewest

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        return in_parts(rows, packed, torch.get_num_threads() if len(rows) >= self.fewest else 1)


@pytest.mark.parametrize(("dtype", "fewest"), [(torch.float32, 1), (torch.bfloat16, 5)])
def test_sums_that_threads_split_are_found_out(dtype: torch.dtype, fewest: int) -> None:
    """Also where the trial itself runs with one thread."""
    with using_threads(1), pytest.raises(UnsupportedModel, match="on the number of threads"):
        row_step(ByThreads(fewest), dtype, 384, outputs=16)


def test_outputs_beyond_whole_tiles_are_tried() -> None:
    class Edge(Exactly):
        def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
            whole = super().multiply(rows, packed, bias)
            whole[:, len(packed) // 64 * 64 :] += len(rows) * 1e-3
            return whole

    assert row_step(Edge(), torch.float32, 8, 6400) == 1
    with pytest.raises(UnsupportedModel, match="depend on the other rows"):
        row_step(Edge(), torch.float32, 8, 6433)


def test_without_compiled_products_a_kernel_that_is_exact_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(96, 40)).to(torch.bfloat16).requires_grad_(False)
    leaky, exactly = Leaky(), Exactly()
    monkeypatch.setattr(kernels, "functions", lambda _: "there is no C compiler")
    monkeypatch.setattr("outpace.targets.cpu.linear.KERNELS", (exactly,))
    packed = Packer(model, pack=True, exact=True)(model[0])
    assert isinstance(packed, Linear) and packed.kernel is exactly
    monkeypatch.setattr("outpace.targets.cpu.linear.KERNELS", (leaky,))
    with pytest.raises(UnsupportedModel, match="depend on the other rows"):
        Packer(model, pack=True, exact=True)(model[0])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_compiled_kernel_comes_before_others(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = COMPILED in available(dtype)
    if not compiled:
        monkeypatch.setattr(kernels, "functions", lambda _: "there is no C compiler")
    taken = chosen_kernel.__wrapped__(dtype)
    if compiled and known:
        assert taken is COMPILED
    elif dtype != torch.float32 and half_is_here():
        assert isinstance(taken, HalfFBGEMM)
    else:
        assert taken is STOCK


@pytest.mark.skipif(not half_is_here(), reason="this processor has no FBGEMM")
def test_weights_in_bfloat16_fit_into_float16_or_are_left() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[0, 0], weight[0, 1] = 1e-6, 1e-8  # below float16's least; kept by the power of two
    packed = HALF.pack(weight)
    identity = torch.eye(64)
    product = HALF.multiply(identity, packed, None)
    assert torch.equal(product.T, weight.float())
    weight[0, 2] = 1e-12
    assert HALF.pack(weight) is None


@pytest.fixture(params=["compiled", "torch's own"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of int8 weights."""
    monkeypatch.setattr(trials, "_row_step", trials._row_step.__wrapped__)  # not the other's
    if request.param != "compiled":
        monkeypatch.setattr(kernels, "functions", lambda _: "there is no C compiler")


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("name", "most"), [("int8", 0.01), ("int4", 0.1)])
def test_rounded_weights_are_near_and_their_rows_alone(name: str, most: float) -> None:
    kernel, generator = QUANTISED[name], torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(count, 96, generator=generator).bfloat16() for count in (48, 40))
    weight[3] = 0
    bias = torch.randn(48, generator=generator).bfloat16()
    packed, step = kernel.pack(weight), row_step(kernel, torch.bfloat16, 96, 48)
    found = kernel.multiply(rows, packed, bias).float() - bias
    expected = rows.float() @ weight.float().T
    alone = [
        kernel.multiply(rows[:count].contiguous(), packed, bias).float() - bias
        for count in range(step, 40, step)
    ]
    assert all(torch.equal(part, found[: len(part)]) for part in alone)
    assert (found - expected).norm() <= most * expected.norm()
    assert found[:, 3].abs().max() <= 0.01  # the bias was added and subtracted
    for count in range(step, 40, step):
        assert torch.equal(
            kernel.multiply(rows[:count].contiguous(), packed, bias).float() - bias, found[:count]
        )


@pytest.mark.parametrize("name", list(QUANTISED))
def test_another_order_of_a_sum_over_rounded_weights_is_found_out(name: str) -> None:
    """Their products have few bits, so that most sums are exact in any order."""

    def turned(values: Tensor) -> Tensor:
        return values.unflatten(1, (-1, 32)).flip(1).flatten(1)  # groups keep their scales

    class Turned(type(QUANTISED[name])):  # type: ignore[misc]
        def pack(self, weight: Tensor) -> Any:
            return super().pack(weight), super().pack(turned(weight))

        def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
            if len(rows) > 1:
                return super().multiply(rows, packed[0], bias)
            return super().multiply(turned(rows), packed[1], bias)

    assert row_step(Turned(), torch.bfloat16, 1024) % 2 == 0


def test_int4_leaves_other_shapes_alone() -> None:
    assert QUANTISED["int4"].pack(torch.ones(48, 40).bfloat16()) is None


def test_int4_of_torch_leaves_other_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "functions", lambda _: "there is no C compiler")
    assert QUANTISED["int4"].pack(torch.ones(40, 64).bfloat16()) is None


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("inputs", [8, 100, 119])
def test_int8_takes_any_number_of_inputs(inputs: int) -> None:
    """torch's kernel reads beyond the rows if it is no multiple of 16."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (48, inputs), generator=generator).bfloat16()
    rows = torch.randint(-3, 4, (7, inputs), generator=generator).bfloat16()
    weight[:, ::32] = rows[:, ::32] = 127  # so that both are integers of 8 bits as they are
    kernel = QUANTISED["int8"]
    found = kernel.multiply(rows, kernel.pack(weight), None)
    assert torch.equal(found, (rows.float() @ weight.float().T).bfloat16())


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("name", QUANTISED)
def test_rounded_weights_take_rows_that_have_gaps(name: str) -> None:
    """As a head's rows have that are picked from a forward's."""
    weight, rows = torch.randn(48, 64).bfloat16(), torch.randn(64, 3).bfloat16().T
    kernel = QUANTISED[name]
    packed = kernel.pack(weight)
    assert torch.equal(kernel.multiply(rows, packed, None), kernel.multiply(rows.contiguous(), packed, None))


# -- activations ------------------------------------------------------------------------

_HALVES = list(product(sorted(ACT2FN), (torch.float32, torch.bfloat16)))
# Each in one of the two dtypes, in turns; the other is slow.
ACTIVATIONS = [
    pytest.param(*pair, marks=pytest.mark.slow if (place // 2 + place) % 2 else ())
    for place, pair in enumerate(_HALVES)
]


@pytest.mark.parametrize(("name", "dtype"), ACTIVATIONS)
def test_activations_have_the_same_bits_among_any_rows_with_any_number_of_threads(
    name: str, dtype: torch.dtype
) -> None:
    """Rows of 1,005 numbers, no multiple of a vector; a part of a wider tensor too."""
    made = ACT2FN[name]
    found = piecewise(made)
    if list(made.parameters()):
        assert found is None
        return
    assert found is not None
    wide = torch.randn(130, 2010, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = wide[:, :1005].contiguous()
    with using_threads(1):
        alone = torch.cat([found(row[None]) for row in rows])
        assert torch.allclose(alone, made(rows), rtol=1e-2, atol=1e-2)
    for threads in (1, 2, 3, 4, 7):
        with using_threads(threads):
            for count in (1, 3, 32, 33, 100, 130):
                assert torch.equal(found(rows[:count]), alone[:count])
                assert torch.equal(found(wide[None, :count, :1005])[0], alone[:count])


# -- targets ----------------------------------------------------------------------------


@cache
def nano(dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=dtype).eval().requires_grad_(False)


@cache
def exact(dtype: torch.dtype) -> CausalTarget:
    return CausalTarget(nano(dtype), exact=True)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def target(request: pytest.FixtureRequest) -> Iterator[CausalTarget]:
    yield exact(request.param)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROMPTS = [[*range(7, 30)], [*range(100, 230)], [500, 501]]


def test_drafts_do_not_change_a_token_in_any_dtype(target: CausalTarget) -> None:
    """Beside other sequences, in chunks and from the prefix cache; bits of logits, not only tokens."""
    assert target.bit_exact and not target.why_inexact
    params = [SamplingParams(max_new_tokens=16, temperature=t, seed=3, ignore_eos=True) for t in (0, 1, 0)]
    plain = [
        Engine(target, "none").generate([prompt], one)[0].tokens
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    engine = Engine(
        target, "token_recycling", adaptive=False, prefill_chunk=17, slots=3, prefix_cache=1 << 24
    )
    for _ in range(2):
        assert [one.tokens for one in engine.generate(PROMPTS, params)] == plain


def test_logits_have_the_same_bits_in_a_tree_and_alone(target: CausalTarget) -> None:
    parents, paths = random_tree(15, 4)
    tokens = list(range(300, 315))
    cache = target.new_cache(2, 256)
    slots = [cache.allocate(), cache.allocate()]
    for slot, prompt in zip(slots, PROMPTS, strict=False):
        target.forward(cache, Batch.of({slot: prompt}, None))
        cache.keep({slot: range(len(prompt))})
    feeds = {slots[1]: Rows(tokens, parents), slots[0]: Rows([9, 9])}
    together = target.forward(cache, Batch.of(feeds)).logits_of(slots[1]).clone()
    cache.keep({})
    for node in paths[max(range(15), key=lambda one: len(paths[one]))]:
        alone = target.forward(cache, Batch.of({slots[1]: [tokens[node]]})).logits_of(slots[1])
        cache.keep({slots[1]: [0]})
        assert torch.equal(alone[0], together[node])


@pytest.mark.parametrize("family", first(1, ["Llama", "GPTNeoX", "Gemma", "Phi3"]))
def test_bits_do_not_depend_on_the_number_of_threads(family: str) -> None:
    """Layers that are not fused, in a forward that torch shares among threads."""
    sizes = {**SMALL, "hidden_size": 96, "intermediate_size": 1005, "num_key_value_heads": 4}
    config = getattr(transformers, f"{family}Config")(**sizes, pad_token_id=0, max_position_embeddings=512)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    of, tokens = CausalTarget(model, plan="exact"), torch.arange(400).remainder(64).tolist()
    parents, _ = random_tree(40, 400)
    found = []
    for threads in (1, 2, 3, 4, 7):
        with using_threads(threads):
            cache = of.new_cache()
            slot = cache.allocate()
            logits = [of.forward(cache, Batch.of({slot: tokens})).logits_of(slot).clone()]
            cache.keep({slot: range(400)})
            logits.append(of.forward(cache, Batch.of({slot: Rows(tokens[:40], parents)})).logits_of(slot))
            found.append(torch.cat(logits))
    assert [torch.equal(logits, found[0]) for logits in found] == [True] * 5


def test_the_model_stays_as_it_is() -> None:
    model = nano(torch.float32)
    ids = torch.arange(5)[None]
    before = model(ids).logits
    exact(torch.float32)
    assert model.config._attn_implementation == "sdpa"
    assert all(type(module) is not Linear for module in model.modules())
    assert torch.equal(model(ids).logits, before)


class Sees(nn.Module):
    """An activation that rounds otherwise in wide forwards."""

    def forward(self, states: Tensor) -> Tensor:
        last = torch.finfo(states.dtype).eps if states.shape[1] > 3 else 0
        return nn.functional.silu(states) * (1 + last)


def test_a_model_that_is_not_bit_exact_says_which_operation() -> None:
    model = tiny_llama(dtype=torch.float32)
    model.model.layers[1].mlp.act_fn = Sees()
    with pytest.raises(
        UnsupportedModel, match=r"model\.layers\.1\.mlp\.act_fn \(Sees\) gives a row other bits"
    ):
        Target(model, exact=True)
    half = tiny_llama(dtype=torch.bfloat16)
    half.model.layers[0].mlp.act_fn = Sees()
    found = Target(half)
    assert not found.bit_exact and "act_fn" in found.why_inexact


class Threaded(nn.Module):
    """An activation that rounds otherwise with three threads."""

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.silu(states) + (0.1 if torch.get_num_threads() == 3 else 0)


def test_a_model_whose_bits_depend_on_threads_is_said_not_to_be_bit_exact() -> None:
    model = tiny_llama(dtype=torch.float32)
    model.model.layers[1].mlp.act_fn = Threaded()
    with using_threads(1), pytest.raises(UnsupportedModel, match="other bits with 3 threads than with 1"):
        Target(model, exact=True)


@pytest.mark.parametrize(
    ("family", "options", "culprit"),
    [
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, r"layers\.0\.mlp"),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}, r"\.0\.mlp"),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "s_aux"),
        ("Gemma2", {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 16}, "softcap"),
    ],
)
def test_experts_sinks_and_soft_caps_are_said_not_to_be_bit_exact(
    family: str, options: dict[str, Any], culprit: str
) -> None:
    """Even where rounding hides it from a test of a few rows."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    target = Target(model)
    assert not target.bit_exact
    assert re.search(culprit, target.why_inexact), target.why_inexact
    with pytest.raises(UnsupportedModel, match=culprit):
        Target(model, exact=True)


def test_layers_that_could_not_be_exchanged_are_said_not_to_be_bit_exact() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, given, output: output)
    assert "layers.1.mlp.up_proj (Linear)" in Target(model).why_inexact


def test_what_cannot_be_had_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModel, match=r"no packed steps: it has no plain linear .*; leave plan out"):
        Target(tiny_llama(), plan="packed")
    with pytest.raises(UnsupportedModel, match="float64 would need a wider type"):
        Target(tiny_llama(), exact=True)
    adapted = tiny_llama(dtype=torch.float32)
    adapted.model.layers[0].mlp.up_proj.base_layer = nn.Identity()
    with pytest.raises(UnsupportedModel, match="adapters"):
        Target(adapted, exact=True)
    assert Target(tiny_llama()).why_inexact
    assert Target(tiny_llama(dtype=torch.bfloat16), exact=False).why_inexact == "exact is off"


PACKS = pytest.mark.skipif(
    not chosen_kernel(torch.bfloat16).copies, reason="no kernel of packed weights is available here"
)


@PACKS
def test_layers_with_hooks_are_not_packed() -> None:
    model = AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=torch.float32).eval()
    found = CausalTarget(model, check=False, plan="packed")
    assert model.lm_head in found._modules._packer.packed
    assert list(found.plan.packed.values()) == [43]
    model.lm_head.register_forward_hook(lambda module, given, output: output)
    other = CausalTarget(model, check=False, plan="packed")
    assert model.lm_head not in other._modules._packer.packed


def test_plans_that_are_named_are_taken_or_refused() -> None:
    model = tiny_llama(dtype=torch.float32)
    with pytest.raises(OutpaceError, match=r"plan must be invariant or .*, not 'fastest'"):
        Target(model, plan="fastest")
    with pytest.raises(UnsupportedModel, match="no stock steps: quantise rounds its weights; leave plan out"):
        Target(tiny_llama(dtype=torch.bfloat16), plan="stock", quantise="int8")
    with pytest.raises(UnsupportedModel, match="no native steps: its shapes are fixed; leave plan out"):
        Target(model, static=True, plan="native")
    with pytest.raises(UnsupportedModel, match="no packed steps: exact=True asks for another"):
        Target(model, exact=True, plan="packed")


def test_packed_steps_that_this_machine_lacks_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "functions", lambda _: "there is no C compiler")
    chosen_kernel.cache_clear()
    try:
        with pytest.raises(UnsupportedModel, match="compiled is not available here: there is no C compiler"):
            Target(tiny_llama(dtype=torch.float32), plan="packed")
    finally:
        chosen_kernel.cache_clear()


@PACKS
def test_weights_that_are_written_to_are_laid_out_again() -> None:
    model = AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=torch.bfloat16).eval()
    target = CausalTarget(model, check=False, plan="packed")
    assert list(target.plan.packed.values()) == [43]

    def logits(of: CausalTarget) -> Tensor:
        cache = of.new_cache()
        return of.forward(cache, Batch.of({cache.allocate(): [5, 6]})).logits.clone()

    before = logits(target)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    after = logits(target)
    assert not torch.equal(before, after)
    assert torch.equal(after, logits(CausalTarget(model, check=False, plan="packed")))
    assert list(target.plan.packed.values()) == [43]


class Wider(nn.Linear):
    """A linear layer of another library."""


def test_weights_are_rounded_where_that_is_possible_only() -> None:
    half = tiny_llama(dtype=torch.bfloat16)
    with pytest.raises(OutpaceError, match="quantise must be int8 or int4, not 'int2'"):
        Target(half, quantise="int2")
    with pytest.raises(UnsupportedModel, match=r"in torch\.float32; load it in bfloat16"):
        Target(tiny_llama(dtype=torch.float32), quantise="int8")
    hooked = tiny_llama(dtype=torch.bfloat16)
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModel, match=r"mlp\.up_proj \(Linear\) has hooks; leave quantise out"):
        Target(hooked, quantise="int8")
    other = tiny_llama(dtype=torch.bfloat16)
    other.lm_head = Wider(32, 97, bias=False).to(torch.bfloat16)
    with pytest.raises(UnsupportedModel, match=r"lm_head \(Wider\) is quantised or replaced already"):
        Target(other, quantise="int4")
    replaced = tiny_llama(dtype=torch.bfloat16)
    replaced.model.layers[0].forward = replaced.model.layers[0].forward
    with pytest.raises(UnsupportedModel, match="forward of their own"):
        Target(replaced, quantise="int4")
    adapted = tiny_llama(dtype=torch.bfloat16)
    adapted.peft_config = {"default": None}
    with pytest.raises(UnsupportedModel, match="adapters"):
        Target(adapted, quantise="int4")
    assert "quantise" not in vars(half) and not Target(half).quantised


def test_rounded_weights_are_a_copy_that_follows_the_models() -> None:
    model = tiny_llama(dtype=torch.bfloat16).requires_grad_(False)
    target = CausalTarget(model, quantise="int8")
    assert target.quantised == "int8" and "int8 weights" in target.identity
    stock = CausalTarget(model, plan="stock")

    def logits(one: CausalTarget) -> Tensor:
        cache = one.new_cache(1, 16)
        slot = cache.allocate()
        return one.forward(cache, Batch.of({slot: [5, 6, 7]})).logits_of(slot).clone()

    before, plain = logits(target), logits(stock)
    assert not torch.equal(before, plain)
    model.model.layers[0].mlp.up_proj.weight.mul_(3)
    after, plain = logits(target), logits(stock)
    assert not torch.equal(after, before)
    assert (after - plain).norm() < 0.1 * plain.norm()


def test_released_weights_are_freed_and_change_no_token() -> None:
    kept, given = (tiny_llama(dtype=torch.bfloat16) for _ in range(2))
    layer, head = given.model.layers[0].mlp.gate_proj, given.get_output_embeddings()
    data = weakref.ref(layer.weight)
    target = Target(given, quantise="int8", check=False)
    whole = Target(kept, quantise="int8")
    assert isinstance(target, CausalTarget) and target.release() and target.released
    gc.collect()
    assert data() is None and layer.weight.is_meta and not head.weight.is_meta
    assert target.identity == whole.identity  # measured costs hold for both
    params = SamplingParams(max_new_tokens=24)
    plain = Engine(whole, "none").generate([[5, 6, 7]], params)[0].tokens
    for drafter in ("none", "lookahead", "early_exit:layers=1", "self_speculative:skip=1"):
        engine = Engine(target, drafter, adaptive=False)
        assert engine.generate([[5, 6, 7]], params)[0].tokens == plain


def test_a_model_whose_weights_were_released_is_refused_elsewhere() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    target = Target(model, quantise="int8")
    assert target.release()
    token, seen = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, 1, dtype=torch.bool)
    with pytest.raises(OutpaceError, match="weights were released; load it again"):
        target.read(token, token, seen)
    with pytest.raises(OutpaceError, match="weights were released; load it again"):
        target.through(target.embed(token), token, seen)
    with pytest.raises(UnsupportedModel, match="has released weights to another target; load it again"):
        Target(model)


def test_nothing_is_released_without_a_copy() -> None:
    model = nano(torch.float32)
    target = Target(model, plan="stock")
    assert isinstance(target, CausalTarget) and not target.release() and not target.released
    assert not any(weight.is_meta for weight in model.parameters())

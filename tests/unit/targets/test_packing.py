"""Weights as C packs and rounds them, what is read back, and memory that is pages of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from outpace.core import OutpaceError
from outpace.native.layers import SHARE, functions
from outpace.targets import CausalTarget
from outpace.targets.cpu import layouts
from outpace.targets.cpu.layouts import Blocks, Panels
from outpace.targets.inputs.changes import WatchedWeights as Watched
from outpace.targets.inputs.mapped import FileMemory
from outpace.targets.native.runner import NativeRunner
from outpace.targets.native.weights import Weights
from outpace.targets.step import replay
from outpace.targets.step.reference import Imprecise
from outpace.targets.step.replay import Replay, layers_of, shown
from zoo.family import randomise

HERE = not isinstance(functions(torch.float32), str)
pytestmark = pytest.mark.skipif(not HERE, reason=f"nothing is compiled here: {functions(torch.float32)}")

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 32), (33, 7), (64, 64), (100, 96), (130, 1), (257, 1025)]


def matrix(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(outputs)
    sizes = torch.rand(outputs, 1, generator=generator)
    return (torch.randn(outputs, inputs, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_panels_have_every_weight_in_its_place(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    weight = matrix(*sizes, dtype)
    packed = Panels.pack([weight])
    rows = packed.weights.transpose(1, 2).reshape(-1, packed.weights.shape[1] * packed.pair)
    assert torch.equal(rows[: sizes[0], : sizes[1]], weight)
    assert not rows[sizes[0] :].any() and not rows[:, sizes[1] :].any()
    assert torch.equal(packed.unpack(), weight)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", [(1, 32), (33, 64), (100, 96), (48, 7), (257, 1025)])
def test_rounded_weights_are_the_nearest_of_their_steps(
    sizes: tuple[int, int], bits: int, dtype: torch.dtype
) -> None:
    weight = matrix(*sizes, dtype)
    weight[0] = 0
    weight[-1] = 0.7
    packed, panel = Blocks.pack([weight], bits), Blocks.pack([weight], bits).panel
    whole = torch.nn.functional.pad(weight.float(), (0, -sizes[1] % SHARE, 0, -sizes[0] % panel))
    groups = whole.view(-1, panel, whole.shape[1] // SHARE, SHARE).transpose(1, 2)
    low, high = groups.amin(-1), groups.amax(-1)
    span = (high - low) / 15 if bits == 4 else torch.maximum(high, -low) / 127
    scale = span.clamp(min=1e-30).bfloat16()
    zero = low.bfloat16() if bits == 4 else torch.zeros_like(scale)
    most = (0, 15) if bits == 4 else (-127, 127)
    numbers = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(*most)
    heads = [scale, zero] if bits == 4 else [scale]
    read = packed.weights.split([*[2 * panel] * len(heads), SHARE * bits // 8 * panel], dim=-1)
    for found, right in zip(read, heads, strict=False):
        assert torch.equal(found.contiguous().view(torch.bfloat16), right)
    quads = read[-1].unflatten(-1, (-1, panel, 4))
    both = torch.cat([quads & 15, quads >> 4], dim=2) if bits == 4 else quads.view(torch.int8)
    assert torch.equal(both.float(), numbers.unflatten(-1, (-1, 4)).transpose(2, 3))


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_a_large_matrix_is_packed_in_pieces(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole panels, each given back before the next one is read; what they hold is the same."""
    weight = matrix(1000, 64, torch.bfloat16)
    given: list[Tensor] = []

    def pack(weights: list[Tensor]) -> Any:
        given.clear()
        return (
            Blocks.pack(weights, bits, after=given.extend)
            if bits
            else Panels.pack(weights, after=given.extend)
        )

    whole = pack([weight])
    assert [len(part) for part in given] == [1000]
    monkeypatch.setattr(layouts, "_PIECE", 100 * 64 * weight.itemsize)
    assert torch.equal(pack([weight]).weights, whole.weights)
    assert len(given) > 5 and torch.equal(torch.cat(given), weight)
    assert torch.equal(pack([weight[:300], weight[300:]]).weights, whole.weights)
    broken = weight.clone()
    broken[400, 3] = torch.nan
    if bits:
        with pytest.raises(OutpaceError, match="differ from those"):
            pack([broken])


def test_layers_are_joined_in_the_order_asked_for() -> None:
    parts = [matrix(count, 64, torch.float32) for count in (96, 32, 64)]
    whole = torch.cat(parts)
    order = torch.randperm(192, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Panels.pack(parts, order).unpack(), whole[order])
    turned = [whole.T.contiguous().T]  # rows with gaps
    assert torch.equal(Panels.pack(turned).unpack(), whole)
    assert torch.equal(Blocks.pack(parts, 4, order).weights, Blocks.pack([whole[order]], 4).weights)


def test_what_is_read_back_is_compared() -> None:
    """A number that no rounding explains is refused, in whichever layer."""
    weight = matrix(40, 64, torch.float32)
    weight[17, 5] = torch.nan
    with pytest.raises(OutpaceError, match="differ from those"):
        Blocks.pack([weight], 4)
    with pytest.raises(OutpaceError, match="without gaps"):
        Panels.pack([weight.expand(2, 40, 64)[0], weight[:, :32]])


def deep(layers: int, dtype: torch.dtype = torch.float32) -> Any:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, 0)
    return model.to(dtype)


# What a wrong scale of scores changes in this model is less than bfloat16's rounding.
@pytest.mark.parametrize(
    ("what", "dtype"),
    [("scale", torch.float32), *((what, dtype) for what in ("before", "joined") for dtype in DTYPES)],
)
def test_a_mistake_in_a_layer_between_is_seen(
    what: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep(12, dtype)
    assert 5 not in shown(model) and len(shown(model)) == 3
    CausalTarget(model, check=True, plan="native")
    right = Weights.layer

    def wrong(weights: Weights, number: int, view: int) -> Any:
        layer = right(weights, number, view)
        if number == 5 and what == "scale":
            layer.scale *= 3
        elif number == 5:
            setattr(layer, what, getattr(right(weights, 3, view), what))
        return layer

    for module in (model.model.layers[3].input_layernorm, model.model.layers[5].input_layernorm):
        torch.nn.init.uniform_(module.weight, 0.5, 2.0)
    monkeypatch.setattr(Weights, "layer", wrong)
    with pytest.raises(Imprecise, match="own layer 5: what it adds"):
        CausalTarget(model, check=True, plan="native")


def test_a_self_test_runs_as_many_layers_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one forward of all layers."""
    runs = NativeRunner.run
    counts: dict[int, int] = {}

    def counted(runner: NativeRunner, *args: Any) -> Any:
        counts[len(runner.layers)] = counts.get(len(runner.layers), 0) + 1
        return runs(runner, *args)

    monkeypatch.setattr(NativeRunner, "run", counted)
    target = CausalTarget(deep(16), check=True, plan="native")
    assert counts[16] == 1 and max(counts) == 16 and sum(counts.values()) > 20
    assert target.bit_exact and target.layers == 16 and len(target._modules.shapes) == 16


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A model read from its file, whose weights are pages of it."""
    deep(2, torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    if not FileMemory().ranges([model.model.layers[0].mlp.up_proj.weight]):
        pytest.skip("the system does not tell which pages of a file were written")
    return model


def test_any_write_to_a_page_of_a_file_is_seen(saved: Any) -> None:
    """A sample of the numbers would miss one."""
    weight = saved.model.layers[1].mlp.down_proj.weight
    watched = Watched([saved.model.layers[1].mlp.down_proj])
    assert not watched.changed(thorough=True)
    weight.data[13, 7] = 3.0
    assert watched.changed(thorough=True) and not watched.changed(thorough=False)
    again = Watched([saved.model.layers[1].mlp.down_proj])
    assert not again.changed(thorough=True)
    weight.data.add_(1.0)
    assert again.changed(thorough=True)


def test_dropped_pages_come_back_and_written_ones_stay(saved: Any) -> None:
    weights = [saved.model.layers[0].mlp.up_proj.weight, saved.model.layers[1].mlp.down_proj.weight]
    before = [weight.detach().clone() for weight in weights]
    weights[1].data[13, 7] = before[1][13, 7] = 3.0
    FileMemory().drop(weights)
    assert all(torch.equal(weight, right) for weight, right in zip(weights, before, strict=True))


def test_a_target_follows_a_write_to_a_page_of_a_file(saved: Any) -> None:
    target = CausalTarget(saved, check=False, plan="native")
    before = target.revision()
    assert target.revision() == before
    saved.model.layers[1].mlp.down_proj.weight.data[13, 7] = 3.0
    assert target.revision() > before
    runner: Any = target._modules.native
    assert float(runner.weights.products[7].packed.unpack()[13, 7]) == 3.0


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_large_head_is_replayed_in_parts_and_its_pages_are_given_back(
    dtype: torch.dtype | None, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_OUTPUTS", 48)  # of 64 tokens
    dropped: list[int] = []
    monkeypatch.setattr(FileMemory, "drop", lambda _, weights: dropped.extend(map(len, weights)))
    ids, layers = torch.tensor([[1, 2, 3]]), layers_of(saved)
    with torch.no_grad():
        states = saved(ids, output_hidden_states=True)
        *_, logits = Replay(saved, layers, dtype)(lambda model: model(ids).logits, states.hidden_states[:2])
    assert dropped == [48, 16]
    torch.testing.assert_close(logits.float(), states.logits.float(), atol=0.02, rtol=0.02)
    assert logits.dtype == (dtype or torch.bfloat16)

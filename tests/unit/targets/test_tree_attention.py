"""Attention over committed columns and a tree, against transformers' own over a dense mask."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as with_softcap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from devices import TRITON_DEVICES
from outpace import Engine, SamplingParams
from outpace.core import UnsupportedModel
from outpace.targets import CausalTarget, Rows
from outpace.targets.gpu.tree_attention import reference, tree_attention, visible
from outpace.targets.inputs.device_rows import compact, dense, in_order, read_numbers, row_numbers
from outpace.targets.inputs.masks import TREE
from replay import Replay
from zoo.families import BY_KIND, FAMILIES

# Heads, those that share keys, rows of a sequence, columns, size, size of values, rows fed before.
SHAPES = [(8, 2, 5, 150, 32, 32, 0), (4, 4, 1, 90, 24, 24, 0), (6, 2, 12, 100, 16, 8, 30)]
# A shape, a dtype, and how far off it may be.
CASES = [
    (SHAPES[2], torch.float32, 1e-4),
    (SHAPES[0], torch.bfloat16, 0.05),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (SHAPES[0], torch.float32, 1e-4),
            (SHAPES[1], torch.float32, 1e-4),
            (SHAPES[0], torch.float16, 0.01),
        )
    ),
]


def case(
    shape: tuple[int, ...], dtype: torch.dtype, sliding: int | None, encode: Any
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Query, keys and values of three sequences, and their masks: encoded, and dense without padding's."""
    heads, kv, width, columns, size, wide, fed = shape
    rng, generator = random.Random(width), torch.Generator().manual_seed(width)
    rows, offsets = [], []
    for own in (width, max(width - 3, 1), 0):  # the last one feeds nothing
        tree = [rng.randint(max(-1, node - 4), node - 1) for node in range(fed + own)]
        rows.append(Rows([1] * own, tree[fed:], fed=tree[:fed]) if own else Rows(()))
        offsets.append(rng.randint(fed + 20, columns - width) if own else 0)
    nodes = fed + width
    numbers = torch.from_numpy(np.asarray(row_numbers(rows, offsets, width, nodes)))
    trees = read_numbers(numbers, width).trees
    parts = [(3, heads, width, size), (3, kv, columns, size), (3, kv, columns, wide)]
    tensors = [torch.randn(part, generator=generator, dtype=torch.float64).to(dtype) for part in parts]
    tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)  # as models make it
    short, seen = encode(trees, sliding)[1], dense(trees, columns, sliding)[1]
    return tensors, short, seen


def expected(
    parts: list[Tensor], seen: Tensor, groups: int, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    query, key, value = parts
    module: Any = SimpleNamespace(
        num_key_value_groups=groups, training=False, is_causal=False, sinks=sinks, head_dim=query.shape[-1]
    )
    scale = query.shape[-1] ** -0.5
    bias = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
    if softcap is not None:
        return with_softcap(module, query, key, value, bias, 0.0, scale, softcap=softcap)[0]
    if sinks is not None:
        return with_sinks(module, query, key, value, bias, scale)[0]
    return sdpa_attention_forward(module, query, key, value, seen, scaling=scale)[0]


def check(
    run: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    off: float,
    device: str = "cpu",
    encode: Any = compact,
) -> None:
    heads, kv = shape[:2]
    sinks = torch.linspace(-2, 3, heads).to(dtype)
    for sliding, softcap, own in ((None, None, None), (9, 3.0, None), (40, None, sinks)):
        parts, short, seen = case(shape, dtype, sliding, encode)
        want = expected(parts, seen, heads // kv, softcap, own)
        given = [part.to(device) for part in (*parts, short)]
        found = run(*given, shape[4] ** -0.5, softcap, None if own is None else own.to(device)).cpu()
        assert found.shape == want.shape and found.isfinite().all()
        for place, count in enumerate((shape[2], max(shape[2] - 3, 1))):
            assert (found[place, :count].double() - want[place, :count].double()).abs().max() < off


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-6), (torch.bfloat16, 0.05)])
def test_reference(shape: tuple[int, ...], dtype: torch.dtype, off: float) -> None:
    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *more: Any) -> Tensor:
        return reference(query, key, value, visible(mask, key.shape[2]), *more)

    check(run, shape, dtype, off)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(
    ("shape", "dtype", "off"),
    CASES,
)
def test_kernels(shape: tuple[int, ...], dtype: torch.dtype, off: float, device: str) -> None:
    """On the CPU by Triton's interpreter."""
    pytest.importorskip("triton")
    from outpace.targets.gpu.tree_kernel import tree_attention as run

    check(run, shape, dtype, off, device)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(
    ("shape", "dtype", "off"),
    CASES,
)
def test_kernels_in_the_order_of_the_text(
    shape: tuple[int, ...], dtype: torch.dtype, off: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of bit-exact targets on a GPU; with stretches so short that there are several."""
    pytest.importorskip("triton")
    from outpace.targets.gpu import invariant_kernels

    monkeypatch.setattr(invariant_kernels, "_SPLIT", 64)
    monkeypatch.setattr(invariant_kernels, "_LAUNCHED", 16)
    check(invariant_kernels.attend, shape, dtype, off, device, in_order)


@pytest.mark.parametrize("name", BY_KIND)
def test_models(name: str) -> None:
    """A model that runs on it gives the tokens that it gives otherwise, through dynamic and fixed shapes."""
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    prompts = [[5, 9, 2, 7, 7, 1, 30, 4, 11, 12, 7, 7], [3, 7]]
    plain = Engine(CausalTarget(FAMILIES[name].build(attention="eager"), check=False))
    expected = [one.tokens for one in plain.generate(prompts, params)]
    model = FAMILIES[name].build(attention=TREE)
    for options in ({}, {"static": True, "runner": Replay(), "check": False}):
        target = CausalTarget(model, **options)
        engine = Engine(target, "lookahead:window=3,ngram=3,guesses=2", slots=2, length=64, adaptive=False)
        assert [one.tokens for one in engine.generate(prompts, params)] == expected


def test_what_it_cannot_do_is_refused() -> None:
    part = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedModel, match="a bias"):
        tree_attention(torch.nn.Identity(), part, part, part, None, position_bias=part)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_models_on_kernels_without_masks_are_taken(implementation: str) -> None:
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    model = FAMILIES["qwen2-sliding"].build()
    (expected,) = Engine(CausalTarget(model, check=False)).generate([[5, 9, 2, 7, 7, 1, 30, 4, 11]], params)
    # Set behind transformers' back: it wants the kernels installed. None of them is called.
    model.config._attn_implementation_internal = implementation
    engine = Engine(CausalTarget(model), "lookahead:window=3,ngram=3,guesses=2", adaptive=False)
    (found,) = engine.generate([[5, 9, 2, 7, 7, 1, 30, 4, 11]], params)
    assert found.tokens == expected.tokens
    assert model.config._attn_implementation == implementation

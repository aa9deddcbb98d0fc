"""Masks row by row against the definition: committed rows and ancestors, within the window."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.cache import KVCache, LayerShape, RowShape, StaticCache, Window
from outpace.core import UnsupportedModel
from outpace.targets.gpu.tree_attention import visible
from outpace.targets.inputs import forward
from outpace.targets.inputs.device_rows import compact, dense, read_numbers, row_numbers, to_device
from outpace.targets.inputs.masks import MaskMaker, tree_masks, unknown_kinds
from outpace.targets.rows import Rows
from outpace.tree import depths

CPU = torch.device("cpu")
SHAPE = RowShape(1, 1, torch.float32, CPU)


def config(implementation: str = "sdpa", **options: Any) -> SimpleNamespace:
    return SimpleNamespace(model_type="test", _attn_implementation=implementation, **options)


def window_of(lengths: list[int], widths: list[int], static: int = 0) -> Window:
    """The window of a forward over sequences of these committed lengths."""
    layers = [LayerShape(SHAPE, SHAPE)]
    cache = StaticCache(layers, len(lengths), static) if static else KVCache(layers, len(lengths), 64)
    slots = [cache.allocate() for _ in lengths]
    for slot, length in zip(slots, lengths, strict=True):
        cache._seats[slot].length = length
    fed = dict(zip(slots, widths, strict=True))
    if isinstance(cache, StaticCache):
        (window,) = cache.begin_fixed(fed, 1)
        return window
    (window,) = cache.begin(fed)
    return window


def test_masks_made_on_a_device_are_those_made_on_the_cpu() -> None:
    """Uneven lengths, a tree that continues rows fed before, padding, and slots that feed nothing."""
    rows = [Rows([1, 2, 3, 4], [-1, 0, 0, 2]), Rows([5, 6], [0, 2], fed=[-1, 0]), Rows(()), Rows([7, 8, 9])]
    for lengths in ([9, 4, 2, 1], [3, 2, 0, 20]):
        window = window_of(lengths, [len(row.tokens) for row in rows], static=40)
        positions = [forward.positions_of(row, o, window.width) for row, o in zip(rows, lengths, strict=True)]
        for sliding in (None, 1, 3, 12, 100):
            expected = tree_masks(rows, window, positions, sliding)
            found = dense(to_device(rows, window, CPU).trees, window.columns, sliding)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), sliding


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), sliding=st.sampled_from([None, 1, 3, 8]))
def test_rows_are_placed_on_a_device_as_on_the_host(seed: int, sliding: int | None) -> None:
    """Trees of all shapes, some fed in two parts; the nodes are padded to a power of two, as steps do."""
    rng = random.Random(seed)
    rows, lengths = [], []
    for _ in range(rng.randint(1, 4)):
        deep = rng.random() < 0.2
        tree = [*range(-1, 13)] if deep else [rng.randint(-1, node - 1) for node in range(rng.randint(1, 9))]
        fed = rng.choice([0, 0, rng.randint(0, len(tree) - 1)])
        rows.append(Rows(list(range(1, len(tree) - fed + 1)), tree[fed:], fed=tree[:fed]))
        lengths.append(rng.randint(fed, 13))
    window = window_of(lengths, [len(row.tokens) for row in rows], static=30)
    positions = [forward.positions_of(row, o, window.width) for row, o in zip(rows, lengths, strict=True)]
    found = read_numbers(torch.from_numpy(row_numbers(rows, window.offsets, window.width, 16)), window.width)
    real, at = found.trees.real, found.trees.positions
    expected = tree_masks(rows, window, positions, sliding)
    for whole, seen, short in zip(
        expected, dense(found.trees, 30, sliding), compact(found.trees, sliding), strict=True
    ):
        assert torch.equal(seen, whole)
        # Where padding sees column 0 in a dense mask, it sees nothing in a compact one.
        assert torch.equal(visible(short, 30), whole & real[:, None, :, None])
    written = window.written(CPU)[1]
    for place, row in enumerate(rows):
        size = len(row.tokens)
        assert real[place].tolist() == [node < size for node in range(window.width)]
        assert found.tokens[place, :size].tolist() == row.tokens
        assert at[place, :size].tolist() == positions[place][:size]
        assert at[place].min() >= 0 and at[place].max() <= max(positions[place])
        assert torch.equal(found.rows[place, :size], written[place, :size])


def positions_of(rows: list[Rows], window: Window) -> list[list[int]]:
    found = []
    for row, offset in zip(rows, window.offsets, strict=True):
        places = range(len(row.tokens)) if row.parents is None else depths(row.parents)
        own = [offset + place for place in places]
        found.append(own + [own[-1] if own else 0] * (window.width - len(own)))
    return found


def sees(rows: Rows, offset: int, node: int, sliding: int | None) -> set[int]:
    """Columns a row may see, by the definition."""
    parents = list(range(-1, len(rows.tokens) - 1)) if rows.parents is None else rows.parents
    chain = []
    while node >= 0:
        chain.append(node)
        node = parents[node]
    path = [*range(offset), *(offset + place for place in reversed(chain))]
    return set(path if sliding is None else path[-sliding:])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Rows], list[int]]:
    rows, lengths = [], []
    for _ in range(draw(st.integers(1, 3))):
        parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 7)))]
        rows.append(Rows([0] * len(parents), draw(st.sampled_from([parents, None]))))
        lengths.append(draw(st.integers(1, 12)))
    if not any(row.tokens for row in rows):
        rows[0] = Rows([0])
    return rows, lengths


@settings(max_examples=150, deadline=None)
@given(batch=batches(), sliding=st.sampled_from([None, 1, 3, 8]), static=st.booleans())
def test_definition(batch: tuple[list[Rows], list[int]], sliding: int | None, static: bool) -> None:
    rows, lengths = batch
    if not static:  # where shapes are not fixed, slots at both ends that feed nothing are not in the window
        fed = [place for place, row in enumerate(rows) if row.tokens]
        rows, lengths = rows[fed[0] : fed[-1] + 1], lengths[fed[0] : fed[-1] + 1]
    window = window_of(lengths, [len(row.tokens) for row in rows], static=30 if static else 0)
    rows, lengths = rows[: window.stop], lengths[: window.stop]
    kinds = ["full_attention", "sliding_attention"] if sliding else ["full_attention"]
    maker = MaskMaker(config(layer_types=kinds, sliding_window=sliding), torch.float32)
    masks = maker(rows, window, positions_of(rows, window), CPU)
    assert isinstance(masks, dict) and sorted(masks) == kinds
    for kind, limit in (("full_attention", None), ("sliding_attention", sliding)):
        mask = masks.get(kind)
        if mask is None:
            if kind in masks:  # left to the model: then its own causal mask must be the same
                assert not static and len(set(lengths)) == 1
                assert all(len(row.tokens) == window.width for row in rows)
                assert window.width == 1
                assert sliding is None or window.columns <= sliding
            continue
        assert mask.shape == (len(rows), 1, window.width, window.columns) and mask.dtype == torch.bool
        for place, row in enumerate(rows):
            for node in range(window.width):
                seen = set(mask[place, 0, node].nonzero().flatten().tolist())
                padding = node >= len(row.tokens)
                assert seen == ({0} if padding else sees(row, lengths[place], node, limit))


@pytest.mark.parametrize(
    ("lengths", "rows", "sliding", "left"),
    [
        ([5], [Rows([1])], None, True),  # a step of plain decoding
        ([5, 5], [Rows([1], [-1]), Rows([1])], None, True),
        ([5, 4], [Rows([1]), Rows([1])], None, False),  # uneven
        ([5], [Rows([1])], 6, True),  # the window holds all
        ([5], [Rows([1])], 5, False),
        ([0], [Rows([1, 2, 3])], None, True),  # the first chunk of a prompt
        ([0, 0], [Rows([1, 2]), Rows([1])], None, False),
        ([0], [Rows([1, 2, 3], [-1, 0, 0])], None, False),  # a tree
        ([2], [Rows([1, 2, 3])], None, False),  # a later chunk
        ([0], [Rows([1, 2, 3])], 2, False),
    ],
)
def test_left_to_the_model(lengths: list[int], rows: list[Rows], sliding: int | None, left: bool) -> None:
    """No mask where the model's own is right, so that sdpa can pick its fastest kernels."""
    window = window_of(lengths, [len(row.tokens) for row in rows])
    maker = MaskMaker(config(sliding_window=sliding), torch.float32)
    assert (maker(rows, window, positions_of(rows, window), CPU) is None) == left
    eager = MaskMaker(config("eager", sliding_window=sliding), torch.float32)
    own = eager(rows, window, positions_of(rows, window), CPU)
    assert (own is None) == (left and window.width == 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_additive(dtype: torch.dtype) -> None:
    rows = [Rows([1, 2, 3], [-1, 0, 0]), Rows([4])]
    window = window_of([3, 1], [3, 1])
    positions = positions_of(rows, window)
    boolean = MaskMaker(config(), dtype)(rows, window, positions, CPU)
    additive = MaskMaker(config("eager"), dtype)(rows, window, positions, CPU)
    assert isinstance(boolean, torch.Tensor) and isinstance(additive, torch.Tensor)
    assert additive.dtype == dtype
    assert torch.equal(additive == 0, boolean)
    assert torch.equal(additive == torch.finfo(dtype).min, ~boolean)


def test_kinds_share_a_tensor_below_the_window() -> None:
    kinds = ["full_attention", "sliding_attention"]
    maker = MaskMaker(config(layer_types=kinds, sliding_window=8), torch.float32)
    rows = [Rows([1, 2, 3], [-1, 0, 0])]
    for length, shared in ((3, True), (30, False)):
        window = window_of([length], [3])
        masks = maker(rows, window, positions_of(rows, window), CPU)
        assert isinstance(masks, dict)
        assert (masks["full_attention"] is masks["sliding_attention"]) == shared


def test_registered_attention() -> None:
    """An attention function of the user's own may serve if the form of its mask is registered with it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    rows, window = [Rows([1, 2, 3], [-1, 0, 0])], window_of([3], [3])
    for form, dtype in ((sdpa_mask, torch.bool), (eager_mask, torch.float32)):
        name = f"outpace_test_{form.__name__}"
        AttentionInterface.register(name, sdpa_attention_forward)
        with pytest.raises(UnsupportedModel, match=name):
            MaskMaker(config(name), torch.float32)
        AttentionMaskInterface.register(name, form)
        mask = MaskMaker(config(name), torch.float32)(rows, window, positions_of(rows, window), CPU)
        assert isinstance(mask, torch.Tensor) and mask.dtype == dtype


@pytest.mark.parametrize("implementation", ["flash_attention_2", "paged|sdpa"])
def test_refused_implementations(implementation: str) -> None:
    with pytest.raises(UnsupportedModel, match="test runs on attn_implementation"):
        MaskMaker(config(implementation), torch.float32)


def test_unknown_kinds() -> None:
    assert unknown_kinds(config(layer_types=["full_attention", "chunked_attention"])) == ["chunked_attention"]
    assert not unknown_kinds(config(layer_types=["full_attention", "sliding_attention"]))

"""The gate for pointers into C: what a compiled function would read beyond its arrays is refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import outpace
from outpace.cache.lanes import Lane, LayerShape, RowShape, buffer_layouts
from outpace.core import OutpaceError, SamplingParams
from outpace.draws import many_rows
from outpace.native import draw, layers, move
from outpace.native.pointers import address, pointer, pointer_or_null, rows_pointer
from outpace.targets.cpu import fused_layer, fused_rows, kernels, linear

HERE = layers.functions(torch.float32)
compiled_here = pytest.mark.skipif(isinstance(HERE, str), reason=f"nothing is compiled here: {HERE}")
PACKAGE = Path(outpace.__file__).parent
# Where an address is taken for something else: to compare it, or for llama.cpp, which is not compiled here.
ELSEWHERE = {"targets/inputs/changes.py", "targets/llamacpp/library.py"}


def test_addresses_are_taken_at_the_gate_alone() -> None:
    taken = re.compile(r"\bdata_ptr\b|\.ctypes\b|__array_interface__|\baddressof\b|\bfrom_address\b")
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if taken.search(p.read_text("utf-8"))}
    assert found - ELSEWHERE == {"native/pointers.py"}


FLOATS = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("tensor", "dtype", "shape"),
    [
        (FLOATS.double(), torch.float32, (3, 8)),
        (FLOATS, torch.float32, (3, 9)),
        (FLOATS, torch.float32, (4, 8)),
        (FLOATS, torch.float32, (24,)),
        (FLOATS[:, ::2], torch.float32, (3, 4)),
        (FLOATS.T, torch.float32, (8, 3)),
        (FLOATS.to("meta"), torch.float32, (3, 8)),
    ],
)
def test_a_tensor_that_is_not_what_a_function_takes_is_refused(
    tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    assert pointer(FLOATS, torch.float32, 3, 8) == FLOATS.data_ptr()
    assert pointer_or_null(None, dtype, *shape) is None
    for gate in (pointer, pointer_or_null):
        with pytest.raises(OutpaceError, match=rf"takes \[{shape[0]}.* in {dtype} .*, not \["):
            gate(tensor, dtype, *shape)


@pytest.mark.parametrize(
    ("array", "shape"),
    [
        (np.zeros(4, np.int64), (4,)),
        (np.zeros(4, np.int32), (5,)),
        (np.zeros(8, np.int32)[::2], (4,)),
    ],
)
def test_an_array_that_is_not_what_a_function_takes_is_refused(array: Any, shape: tuple[int, ...]) -> None:
    whole = np.zeros(4, np.int32)
    assert address(whole, np.int32, 4) == whole.ctypes.data
    with pytest.raises(OutpaceError, match=r"a compiled function takes \["):
        address(array, np.int32, *shape)


@pytest.mark.parametrize(
    ("shape", "strides", "dtype"),
    [
        ((3, 2, 5, 4), (40, 20), torch.float32),  # sequences
        ((2, 1, 5, 4), (40, 20), torch.float32),  # heads
        ((2, 2, 6, 4), (40, 20), torch.float32),  # rows
        ((2, 2, 5, 3), (40, 20), torch.float32),  # size
        ((2, 2, 5, 4), (20, 40), torch.float32),  # strides, as of keys that differ from values
        ((2, 2, 5, 4), (40, 20), torch.bfloat16),
    ],
)
def test_a_buffer_that_is_smaller_than_a_forward_needs_is_refused(
    shape: tuple[int, ...], strides: tuple[int, int], dtype: torch.dtype
) -> None:
    buffer = torch.zeros(2, 2, 5, 4)
    assert rows_pointer(buffer, torch.float32, (1, 2, 3, 4), (40, 20)) == buffer.data_ptr()
    with pytest.raises(OutpaceError, match="a compiled function takes"):
        rows_pointer(buffer, dtype, shape, strides)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # compiled, and torch's
@pytest.mark.parametrize("count", [0, -1, 6])
def test_no_best_logits_and_more_than_there_are_are_refused(count: int, dtype: torch.dtype) -> None:
    with pytest.raises(OutpaceError, match=f"the best 1 to 5 of 5 logits, not {count}"):
        layers.best(torch.zeros(2, 5, dtype=dtype), count)


@compiled_here
@pytest.mark.parametrize(
    "kernel", [kernels.Compiled(), kernels.Int8(), kernels.Int4()], ids=lambda kernel: kernel.name
)
def test_rows_and_biases_that_a_product_does_not_take_are_refused(kernel: kernels.Kernel) -> None:
    weights, multiply = kernel.pack(torch.zeros(6, 64, dtype=torch.bfloat16)), kernels.multiply
    rows, bias = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)
    assert multiply(rows, weights, bias).shape == (3, 6)
    assert multiply(rows.expand(2, 3, 64)[0].T.contiguous().T, weights, None).shape == (3, 6)
    for wrong, own in ((rows[:, :63], bias), (rows.float(), bias), (rows, bias[:5]), (rows, bias.float())):
        with pytest.raises(OutpaceError, match="a compiled function takes"):
            multiply(wrong, weights, own)
    for part in ({"outputs": 600}, {"weights": weights.weights[:, :-1]}, {"inputs": 65}):
        with pytest.raises(OutpaceError, match="a compiled function takes"):
            multiply(rows, weights._replace(**part), None)


@compiled_here
def test_rows_that_a_norm_does_not_take_are_refused() -> None:
    norm = linear.Norm(nn.Parameter(torch.ones(32)), 1e-5)
    assert norm(torch.ones(2, 3, 32)).shape == (2, 3, 32)
    for wrong in (torch.ones(2, 16), torch.ones(2, 3, 64), torch.ones(2, 32, dtype=torch.bfloat16)):
        with pytest.raises(OutpaceError, match="a compiled function takes"):
            norm(wrong)
    with pytest.raises(OutpaceError, match="a multiple of 16 weights of a norm, not 24"):
        linear.Norm(nn.Parameter(torch.ones(24)), 1e-5)


@pytest.mark.skipif(isinstance(move.functions(), str), reason="nothing is compiled here")
@pytest.mark.parametrize("moves", [([2], [0], [1]), ([0], [5], [1]), ([0], [1], [-1]), ([-1], [1], [1])])
def test_moves_outside_of_a_lane_are_refused(moves: tuple[list[int], list[int], list[int]]) -> None:
    shape = RowShape(heads=2, size=3, dtype=torch.float32, device=torch.device("cpu"))
    lane = Lane(buffer_layouts([LayerShape(shape, shape)]), places=2, room=4)
    lane.move([], [], [])
    lane.move([1], [4], [0])
    with pytest.raises(OutpaceError, match="rows 0 to 4 of 2 slots"):
        lane.move(*moves)


@pytest.mark.skipif(isinstance(draw.functions(), str), reason="nothing is compiled here")
def test_rows_without_parameters_or_in_another_dtype_are_not_drawn() -> None:
    functions: Any = draw.functions()
    params = [SamplingParams(temperature=1.0)] * 2
    assert len(many_rows._draw_compiled(functions, torch.zeros(2, 9), params, [1, 2])) == 2
    for given, words in ((params[:1], [1, 2]), (params, [1]), (params[:1], [1])):
        with pytest.raises(OutpaceError, match="parameters and a key for each of 2 rows"):
            many_rows._draw_compiled(functions, torch.zeros(2, 9), given, words)
    with pytest.raises(OutpaceError, match="a compiled function takes"):
        many_rows._draw_compiled(functions, torch.zeros(2, 9).double(), params, [1, 2])


@compiled_here
@pytest.mark.parametrize(
    ("batch", "width", "line", "mask"),
    [
        (1, 2, [0, 2], None),  # a cell beyond the grid
        (1, 2, [-1, 0], None),
        (2, 2, None, (1, 1, 2, 4)),  # a mask of fewer rows
        (1, 2, None, (1, 2, 2, 4)),  # of several heads
    ],
)
def test_rows_outside_of_a_forward_are_refused(
    batch: int, width: int, line: list[int] | None, mask: tuple[int, ...] | None
) -> None:
    window: Any = SimpleNamespace(
        slots=[None] * batch, width=width, offsets=[0] * batch, widths=[width] * batch, columns=4
    )
    heads = fused_rows.HeadSizes(1, 1, 32, torch.float32)
    rotation = (torch.zeros(batch, width, 32),) * 2
    seen = None if mask is None else torch.ones(mask, dtype=torch.bool)
    with pytest.raises(OutpaceError, match="a compiled function"):
        fused_rows.LayerRows(heads, seen, None if line is None else torch.tensor(line), window, rotation)


def test_products_that_a_fused_layer_does_not_take_are_refused() -> None:
    config = SimpleNamespace(
        hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1
    )
    attention: Any = SimpleNamespace(config=config, head_dim=32)
    sizes = [(32, 128), (64, 32), (32, 96), (48, 32)]
    products = [nn.Linear(*size, device="meta") for size in sizes]
    fused_layer._check_sizes(attention, products, torch.float32)
    for place, (inputs, outputs) in enumerate(sizes):
        for size in ((inputs, outputs - 1), (inputs + 1, outputs)):
            wrong = [*products[:place], nn.Linear(*size, device="meta"), *products[place + 1 :]]
            with pytest.raises(OutpaceError, match="products with inputs and outputs"):
                fused_layer._check_sizes(attention, wrong, torch.float32)

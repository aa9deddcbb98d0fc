"""The gate for pointers into C: what a compiled function would read beyond its arrays is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import outpace
from outpace.cache.lanes import Lane, LayerShape, RowShape, buffer_layouts
from outpace.core import OutpaceError, SamplingParams
from outpace.draws import many_rows
from outpace.native import draw, layers, move
from outpace.native.pointers import address, pointer, pointer_or_null, rows_pointer
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch
from outpace.targets.cpu import kernels, layouts, linear
from outpace.targets.cpu.compiled_attention import AttendedRows, Sizes

HERE = layers.functions(torch.float32)
compiled_here = pytest.mark.skipif(isinstance(HERE, str), reason=f"nothing is compiled here: {HERE}")
PACKAGE = Path(outpace.__file__).parent
# Where an address is taken for something else: to compare it, to ask the system of its page, or for
# llama.cpp, which is not compiled here.
ELSEWHERE = {"targets/inputs/changes.py", "targets/inputs/mapped.py", "targets/llamacpp/library.py"}


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
    weights, multiply = kernel.pack(torch.zeros(6, 64, dtype=torch.bfloat16)), layouts.multiply
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
    norm = linear.CompiledNorm(nn.Parameter(torch.ones(32)), 1e-5)
    assert norm(torch.ones(2, 3, 32)).shape == (2, 3, 32)
    for wrong in (torch.ones(2, 16), torch.ones(2, 3, 64), torch.ones(2, 32, dtype=torch.bfloat16)):
        with pytest.raises(OutpaceError, match="a compiled function takes"):
            norm(wrong)
    with pytest.raises(OutpaceError, match="a multiple of 16 weights of a norm, not 24"):
        linear.CompiledNorm(nn.Parameter(torch.ones(24)), 1e-5)


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
def test_a_mask_of_other_sizes_is_refused() -> None:
    sizes = Sizes(2, 2, 4, 1, 1, 32, torch.float32)
    with pytest.raises(OutpaceError, match="a mask of 4 rows"):
        AttendedRows(sizes, torch.ones(1, 1, 2, 4, dtype=torch.bool))


@compiled_here
@pytest.mark.parametrize(
    "wrong",
    [
        {"parents": [-1, 1, 0]},  # a node under itself, from which no path leads back
        {"parents": [-1, 2, 0]},
        {"parents": [-2, 0, 0]},
        {"tokens": [1, 2, 1 << 20]},
        {"tokens": [1, -1, 2]},
        {"read": [3]},
    ],
)
def test_a_batch_that_leads_out_of_its_arrays_is_refused(wrong: dict[str, list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=torch.float32)
    target: Any = CausalTarget(model, check=False)
    cache = target.new_cache()
    batch = Batch.of({cache.allocate(): Rows([1, 2, 3], [-1, 0, 0])})
    changed = {name: np.array(value, dtype=np.int32) for name, value in wrong.items()}
    with pytest.raises(OutpaceError, match="outside of its arrays"):
        target._modules.native.run(cache, replace(batch, **changed), target._modules.cache_layers)

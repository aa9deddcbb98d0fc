"""Compiled products: those of torch, in every instruction set, and for a row the same bits among any rows."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outpace.learned.layers import FeedForward, LayerConfig
from outpace.native import build, layers
from outpace.targets.cpu import kernels, linear, trials
from outpace.targets.cpu.kernels import Compiled, Int4, Int8, Rounded
from outpace.targets.cpu.layouts import Blocks
from outpace.targets.cpu.trials import row_step
from outpace.targets.kernel import StockKernel
from parts import first

HERE = layers.functions(torch.float32)
pytestmark = pytest.mark.skipif(isinstance(HERE, str), reason=f"nothing is compiled here: {HERE}")
DTYPES = [torch.float32, torch.bfloat16]
# Flags that leave out instructions which this machine may have.
_FLAGS = ["", *(["-mno-avx", "-mno-avx512f", "-mno-avx512bf16"] if platform.machine() == "x86_64" else ())]
FEWER = first(1, [pytest.param(flag, id=flag[5:] or "native") for flag in _FLAGS])
# Rows, inputs, outputs: tiles of all sizes, parts of panels, inputs in several parts.
SHAPES = [(1, 96, 40), (5, 34, 64), (7, 2050, 65), (13, 4100, 3), (96, 10, 130), (203, 66, 70)]
# Inputs that do not fill a pair, the last one in a part of its own, or all in one.
SHAPES += [(1, 119, 40), (7, 2051, 65), (13, 513, 3), (203, 1, 70)]


@pytest.fixture(scope="module", params=FEWER)
def kernel(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """The kernel, compiled anew for a smaller instruction set than the processor's."""
    if not request.param:
        yield Compiled()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTPACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(build, "FLAGS", (*build.FLAGS, *request.param.split()))
        made = {dtype: layers.functions.__wrapped__(dtype) for dtype in DTYPES}
        for module in (kernels, layers):
            patch.setattr(module, "functions", made.__getitem__)
        yield Compiled()


def some(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_torch(kernel: Compiled, dtype: torch.dtype) -> None:
    for rows, inputs, outputs in SHAPES:
        given, weight, bias = (
            some(rows, inputs, dtype),
            some(outputs, inputs, dtype),
            some(1, outputs, dtype)[0],
        )
        packed, sizes = kernel.pack(weight), given.double().abs() @ weight.double().abs().T
        for own in (None, bias):
            expected = given.double() @ weight.double().T + (0 if own is None else own.double())
            found = kernel.multiply(given, packed, own).double()
            assert found.shape == expected.shape
            assert ((found - expected).abs() <= 4 * (sizes + 3) * torch.finfo(dtype).eps).all()


def in_blocks(values: Tensor, bits: int, signed: bool) -> Tensor:
    """Values [n, inputs] in float64, rounded to 8 bits with a scale, or 4 and a zero, per 32 inputs."""
    missing = -values.shape[1] % 32
    groups = torch.nn.functional.pad(values.float(), (0, missing)).unflatten(1, (-1, 32))
    if bits == 4:
        low = groups.amin(dim=2, keepdim=True)
        scale = ((groups.amax(dim=2, keepdim=True) - low) / 15).clamp(min=1e-30).bfloat16().float()
        zero = low.bfloat16().float()
        numbers = ((groups - zero) / scale).round().clamp(0, 15)
        return (numbers.double() * scale.double() + zero.double()).flatten(1)[:, : values.shape[1]]
    scale = (groups.abs().amax(dim=2, keepdim=True) / 127).clamp(min=1e-30)
    scale = scale.bfloat16().float() if signed else scale
    numbers = (groups / scale).round().clamp(-127, 127)
    return (numbers.double() * scale.double()).flatten(1)[:, : values.shape[1]]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("rounding", [Int8(), Int4()], ids=lambda kernel: kernel.name)
def test_rounded_products_are_those_of_the_rounded_numbers(rounding: Rounded) -> None:
    for rows, inputs, outputs in SHAPES:
        given, weight, bias = (
            some(*size, torch.bfloat16) for size in ((rows, inputs), (outputs, inputs), (1, outputs))
        )
        weight[0] = given[-1, : inputs // 2] = 0
        if (packed := rounding.pack(weight)) is None:
            assert rounding.bits == 4 and inputs % 32
            continue
        assert isinstance(packed, Blocks)
        weights, numbers = in_blocks(weight, rounding.bits, signed=True), in_blocks(given, 8, signed=False)
        expected = numbers @ weights.T + bias[0].double()
        sizes = numbers.abs() @ weights.abs().T + 3
        found = rounding.multiply(given, packed, bias[0]).double()
        assert ((found - expected).abs() <= sizes * torch.finfo(torch.bfloat16).eps).all()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("rounding", [Int8(), Int4()], ids=lambda kernel: kernel.name)
def test_a_rounded_row_has_the_same_bits_among_any_rows(rounding: Rounded) -> None:
    given, packed = some(43, 2048, torch.bfloat16), rounding.pack(some(70, 2048, torch.bfloat16))
    whole = rounding.multiply(given, packed, None)
    for count in (*range(1, 9), 12, 16, 20):
        parts = [rounding.multiply(part, packed, None) for part in given.split(count)]
        assert torch.equal(torch.cat(parts), whole)
    given[4] = torch.nan
    given[7, 33] = torch.inf
    found = rounding.multiply(given, packed, None)
    assert not found[[4, 7]].isfinite().any()
    assert torch.equal(found[[3, 5, 6, 8]], whole[[3, 5, 6, 8]])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "size", "count"), [(1, 1, 1), (3, 5, 5), (2, 31, 4), (4, 4096, 3), (2, 70000, 9)]
)
def test_the_best_logits_are_the_first_of_a_stable_sort(
    rows: int, size: int, count: int, dtype: torch.dtype
) -> None:
    given = some(rows, size, dtype).mul(3).round()  # with many equal ones
    given[0, 1 + size // 2 :] = -torch.inf
    scores, places, totals = layers.best(given.T.contiguous().T, count)
    expected, order = given.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(scores, expected[:, :count]) and torch.equal(places, order[:, :count])
    assert torch.allclose(totals.double(), given.double().logsumexp(dim=-1), atol=1e-4)


def test_the_best_logits_without_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    given = some(3, 100, torch.bfloat16)
    expected = layers.best(given, 4)
    monkeypatch.setattr(layers, "functions", lambda dtype: "no compiler")
    for found, own in zip(layers.best(given, 4), expected, strict=True):
        assert torch.allclose(found, own)
    assert layers.best(given.double(), 4)[0].dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_the_others_or_on_threads(kernel: Compiled, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert row_step(kernel, dtype, 2051, 70) == 1
            assert row_step(Int8(), torch.bfloat16, 2051, 70) == 1
            assert row_step(Int4(), torch.bfloat16, 2048, 70) == 1
        given, packed = some(203, 2051, dtype), kernel.pack(some(130, 2051, dtype))
        shared = kernel.multiply(given, packed, None)
        torch.set_num_threads(1)
        for start, stop in ((0, 203), (3, 4), (7, 20), (90, 203)):
            assert torch.equal(kernel.multiply(given[start:stop], packed, None), shared[start:stop])
    finally:
        torch.set_num_threads(before)


def test_rows_of_another_dtype_are_refused() -> None:
    packed = Compiled().pack(some(40, 34, torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"packed in torch\.bfloat16 got rows in torch\.float32"):
        Compiled().multiply(some(2, 34, torch.float32), packed, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_spoils_no_other(kernel: Compiled, dtype: torch.dtype) -> None:
    """Nor does what lies behind the last one, with inputs that do not fill a pair."""
    given, packed = some(9, 33, dtype), kernel.pack(some(40, 33, dtype))
    expected = kernel.multiply(given, packed, None)
    given[3::3] = torch.nan
    found = kernel.multiply(given, packed, None)
    assert torch.equal(found[[0, 1, 2, 4, 5, 7, 8]], expected[[0, 1, 2, 4, 5, 7, 8]])
    assert found[3::3].isnan().all()


def test_without_compiled_functions_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "functions", lambda _: "there is no C compiler")
    assert trials.why_unavailable(Compiled(), torch.float32) == "there is no C compiler"
    assert isinstance(trials.chosen_kernel.__wrapped__(torch.float32), StockKernel)


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("size", [64, 40])  # norms are compiled for multiples of 16
def test_a_packed_drafter_is_nearly_the_drafter(
    size: int, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "chosen_kernel", lambda _: Compiled() if rounds else StockKernel())
    torch.manual_seed(0)
    drafter = nn.ModuleDict(
        {
            "norm": nn.RMSNorm(size, eps=1e-5),
            "feed": FeedForward(LayerConfig(hidden_size=size, intermediate_size=96)),
        }
    )
    nn.init.normal_(drafter["norm"].weight)
    drafter = drafter.bfloat16().requires_grad_(False)
    given = some(3, size, torch.bfloat16)[None]
    with torch.inference_mode():
        normed = drafter["norm"](given)
        expected = drafter["feed"](normed)
        linear.pack_drafter(drafter)
        own = drafter["norm"](given)
        found = drafter["feed"](own)
    assert isinstance(drafter["norm"], linear.CompiledNorm) == (rounds and size % 16 == 0)
    assert {type(layer) for layer in drafter["feed"].children()} == {linear.Linear if rounds else nn.Linear}
    assert torch.allclose(own, normed, rtol=0.01)
    assert torch.equal(found, expected) != rounds
    assert torch.allclose(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))

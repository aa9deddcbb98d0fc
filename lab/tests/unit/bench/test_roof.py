"""The work of a step, counted by hand, and what the machine's limits and the widths are measured on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

from models import tiny_llama
from outpace.core import OutpaceError
from outpace.targets import Target
from outpace.testing import ToyTarget
from outpace_lab.bench import roof
from outpace_lab.bench.roof import Limits, measure_limits, measure_roof, work_of


def test_the_work_of_a_step_of_a_small_llama() -> None:
    model = tiny_llama(dtype=torch.float64)
    work = work_of(Target(model))
    heads, shared, size, inner, vocabulary, layers = 4, 2, 8, 64, 97, 2
    hidden = heads * size
    layer = 2 * hidden * heads * size + 2 * hidden * shared * size + 3 * hidden * inner
    matrices = layers * layer + vocabulary * hidden  # and the head; embeddings are looked up
    norms = (2 * layers + 1) * hidden
    assert work.weight_numbers == matrices
    assert work.weight_bytes == 8 * (matrices + norms)
    assert work.row_bytes == 8 * layers * 2 * shared * size
    # Each of the four query heads meets the keys and the values.
    assert work.attention_numbers == layers * 2 * heads * size
    assert work.bytes(2, 10) == work.weight_bytes + 20 * work.row_bytes
    assert work.operations(3, 10) == 2 * 3 * (matrices + 10 * work.attention_numbers)


def test_a_quantised_weight_is_read_as_it_is_stored() -> None:
    """Not as wide as its rows: this stand-in, like torchao's, is a tensor made of others."""

    class Rounded(torch.Tensor):
        stored: torch.Tensor
        scales: torch.Tensor

        def __tensor_flatten__(self) -> Any:
            return ["stored", "scales"], None

    model = tiny_llama()
    before = work_of(Target(model)).weight_bytes
    whole = model.lm_head.weight
    rounded = torch.nn.Parameter(whole.data.as_subclass(Rounded))
    rounded.stored = torch.zeros(whole.shape, dtype=torch.int8)  # type: ignore[attr-defined]
    rounded.scales = torch.zeros(len(whole))  # type: ignore[attr-defined]
    model.lm_head.weight = rounded
    target = Target(model, check=False)
    assert before - work_of(target).weight_bytes == whole.nbytes - whole.numel() - 4 * len(whole)


def test_a_head_that_is_the_embeddings_is_read() -> None:
    model = tiny_llama()
    apart = work_of(Target(model)).weight_numbers
    model.lm_head.weight = model.model.embed_tokens.weight
    assert work_of(Target(model)).weight_numbers == apart


def test_the_least_time_is_that_of_the_nearer_limit() -> None:
    limits = Limits(bandwidth=10.0, buffer_bytes=1, operations=100.0)
    assert limits.seconds(50, 100) == 5 and limits.seconds(50, 1000) == 10


def experts() -> Target:
    config = MixtralConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        max_position_embeddings=64,
    )
    return Target(MixtralForCausalLM(config).float().eval(), check=False)


def test_targets_without_a_known_roof() -> None:
    for measured in (work_of, lambda target: measure_roof(target, 1, "cpu", torch.float32)):
        with pytest.raises(OutpaceError, match="no roof is known for a ToyTarget"):
            measured(ToyTarget())
    with pytest.raises(OutpaceError, match="no roof is known for experts"):
        work_of(experts())


def test_of_experts_the_step_times_are_known_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "_ROUNDS", 1)
    found = measure_roof(experts(), 30, "cpu", torch.float32)
    assert found.work is None
    assert [width.rows for width in found.widths] == [1, 2, 4, 8, 16, 32]
    assert all(width.seconds > 0 and width.least is None for width in found.widths)


def test_the_widths_fit_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "_ROUNDS", 1)
    target = Target(tiny_llama(context=40))
    found = measure_roof(target, 30, "cpu", torch.float64)
    assert [width.rows for width in found.widths] == [1, 2, 4, 8, 16, 32]
    assert found.context == 1
    assert all(width.seconds > 0 for width in found.widths)
    assert [width.least for width in found.widths] == [
        found.limits.seconds(found.work.bytes(1, 1), found.work.operations(rows, 1))
        for rows in (1, 2, 4, 8, 16, 32)
    ]
    wide = measure_roof(Target(tiny_llama(context=256)), 100, "cpu", torch.float64)
    assert wide.context == 100 and wide.widths[-1].rows == 128


class Seen(TorchDispatchMode):
    """A recorder of operations and their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket.__name__, [one for one in args if torch.is_tensor(one)]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[torch.Tensor]]]:
    """Record what is timed; rounds of a matrix product take 4 and 2 seconds, earlier others longer."""
    calls: list[tuple[str, list[torch.Tensor]]] = []

    def rounds(work: Callable[[], object], device: str) -> list[float]:
        with Seen() as seen:
            work()
        calls.extend(seen.calls)
        return [4.0, 2.0] if calls[-1][0] == "mm" else [9.0, 8.0 / len(calls)]

    monkeypatch.setattr(roof, "_rounds", rounds)
    return calls


@pytest.mark.parametrize(
    ("dtype", "multiplied"),
    [
        (torch.float32, {torch.float32}),
        (torch.bfloat16, {torch.bfloat16, torch.float32}),
        (torch.float64, {torch.float64}),
    ],
)
def test_limits_are_those_of_what_was_timed(
    timed: list[tuple[str, list[torch.Tensor]]], dtype: torch.dtype, multiplied: set[torch.dtype]
) -> None:
    found = measure_limits(3 << 20, "cpu", dtype)
    readings = [tensors[0] for name, tensors in timed if name != "mm"]
    products = [tensors for name, tensors in timed if name == "mm"]
    assert [name for name, _ in timed if name != "mm"] == ["mv", "sum"]
    assert [read.numel() * read.element_size() for read in readings] == [3 << 20] * 2
    # The best round of the faster of two ways to read: 4 seconds.
    assert found.buffer_bytes == 3 << 20 and found.bandwidth == (3 << 20) / 4
    assert {one.dtype for one, _ in products} == multiplied
    # Each of a product's numbers takes as many multiplications as additions.
    (rows, inner), (_, columns) = products[0][0].shape, products[0][1].shape
    assert found.operations == 2 * rows * inner * columns / 2.0


def test_the_buffer_is_as_large_as_the_weights_within_reason(
    timed: list[tuple[str, list[torch.Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_limits(5, "cpu", torch.float32).buffer_bytes == 1 << 20
    assert 1 << 28 <= roof._MOST_BUFFER <= 1 << 30
    monkeypatch.setattr(roof, "_MOST_BUFFER", 2 << 20)
    assert measure_limits(7 << 30, "cpu", torch.float32).buffer_bytes == 2 << 20
    assert max(one.nbytes for name, (one, *_) in timed if name != "mm") == 2 << 20


def test_limits_are_measured() -> None:
    found = measure_limits(1 << 20, "cpu", torch.float32)
    assert 0 < found.bandwidth < math.inf and 0 < found.operations < math.inf

"""The work of a step, counted by hand, and that the machine's limits and the widths are measured at all."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from models import tiny_llama
from outpace.bench import roof
from outpace.bench.roof import Limits, measure_limits, measure_roof, work_of
from outpace.core import OutpaceError
from outpace.targets import Target
from outpace.testing import ToyTarget


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


def test_a_head_that_is_the_embeddings_is_read() -> None:
    model = tiny_llama()
    apart = work_of(Target(model)).weight_numbers
    model.lm_head.weight = model.model.embed_tokens.weight
    assert work_of(Target(model)).weight_numbers == apart


def test_the_least_time_is_that_of_the_nearer_limit() -> None:
    limits = Limits(bandwidth=10.0, buffer_bytes=1, operations=100.0)
    assert limits.seconds(50, 100) == 5 and limits.seconds(50, 1000) == 10


def test_targets_without_a_known_roof() -> None:
    with pytest.raises(OutpaceError, match="no roof is known for a ToyTarget"):
        work_of(ToyTarget())
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
    target = Target(MixtralForCausalLM(config).float().eval(), check=False)
    with pytest.raises(OutpaceError, match="no roof is known for experts"):
        work_of(target)


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


def test_limits_are_of_a_buffer_as_large_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "_ROUNDS", 1)
    found = measure_limits(3 << 20, "cpu", torch.float32)
    assert found.buffer_bytes == 3 << 20
    assert measure_limits(5, "cpu", torch.float32).buffer_bytes == 1 << 20
    assert found.bandwidth > 0 and found.operations > 0

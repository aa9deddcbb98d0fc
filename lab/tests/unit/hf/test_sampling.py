"""The laboratory's drafters through generate(): the tokens without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace_lab.train.methods import LEARNED
from unit.hf import conftest, test_sampling
from unit.hf.test_sampling import check_spec, untrained
from unit.hf.tiny import make

# Fixtures.
tokenizer, batch, none = conftest.tokenizer, conftest.batch, test_sampling.none

SPECS = [
    "early_exit:layers=1,min_confidence=0",
    "self_speculative:skip=1",
    "windowed:sinks=1,recent=4",
]


@pytest.mark.parametrize("spec", SPECS)
def test_by_its_spec(spec: str, none: Any, batch: Any) -> None:
    check_spec(spec, make("llama"), none, batch)


@pytest.mark.parametrize("name", ["blockwise", "parallel_tokens", "spec_drafter"])
def test_untrained(name: str, none: Any, batch: Any, tmp_path: Path) -> None:
    model = make("llama")
    check_spec(untrained(LEARNED[name], model, tmp_path), model, none, batch)

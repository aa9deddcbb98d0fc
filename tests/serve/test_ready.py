"""The drafters that a server offers without being told to."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.core import OutpaceError
from outpace.drafters import DRAFTERS, load_drafter
from outpace.drafters.copying.suffix import Suffix
from outpace.drafters.parallel.jacobi import Jacobi
from outpace.serve.admission import Limits
from outpace.serve.engine import make_engine, ready_drafters
from outpace.targets import TargetModel
from serving import model


def test_they_are_those_that_need_nothing_and_remember_no_outputs() -> None:
    found = ready_drafters(load_drafter("lookahead"), model().target)
    # Weights are not rounded without compiled functions.
    assert {*found, "self"} == {name for name, cls in DRAFTERS.items() if not cls.needs} - {
        "none",
        "lookahead",
    }
    assert found["suffix"] == Suffix(memory=0)


def test_a_name_that_the_user_gives_is_the_users() -> None:
    engine = make_engine(model(), "none", Limits(), {"suffix": "reference"}, ready=True)
    assert {"suffix", "lookahead", "jacobi"} <= {*engine.drafter_names}
    assert engine.drafter_names.count("suffix") == 1 and engine.reads_references("suffix")
    assert make_engine(model(), "none", Limits()).drafter_names == ["request"]


def test_what_the_target_refuses_or_would_cut_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Jacobi, target: TargetModel) -> Any:
        raise OutpaceError("no")

    monkeypatch.setattr(Jacobi, "prepare", refuse)
    target = model().target
    assert "jacobi" not in ready_drafters(load_drafter("none"), target)
    monkeypatch.setattr(target, "why_chains_only", "it is said", raising=False)
    found = ready_drafters(load_drafter("none"), target)
    assert {*found} - {"self"} == {"lookahead", "prompt_lookup", "suffix"}
    assert not any(one.trees for one in found.values())


def test_a_drafter_that_replaces_the_target_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jacobi, "attach", lambda self, target: target)
    assert ready_drafters(Jacobi(), model().target) == {}

"""Spec strings: every drafter by name, its options by type, and the messages about mistakes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from outpace.core import OutpaceError
from outpace.drafters import DRAFTERS, load_drafter
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.none import NoDraft
from outpace.drafters.parallel.jacobi import Jacobi

# Drafters that have options without a default.
WITH_WHAT_IT_NEEDS = {
    "either": "either:(suffix)+(prompt_lookup)",
    "combined": "combined:(lookahead)",
    "dflash": "dflash:path=folder",
    "hydra": "hydra:path=folder",
    "peagle": "peagle:path=folder",
}


@dataclass(frozen=True)
class Options(NoDraft):
    needed: int
    either: int | None = 1
    flag: bool = False
    share: float = 0.5
    mode: Literal["slow", "fast"] = "slow"
    many: list[int] = field(default_factory=list)
    model: Any = None

    paper: ClassVar[str] = "none"


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "options", Options)


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_every_drafter_loads_by_name_and_is_public(name: str) -> None:
    drafter = load_drafter(WITH_WHAT_IT_NEEDS.get(name, name))
    assert type(drafter) is DRAFTERS[name]
    assert type(drafter).__module__.startswith("outpace.drafters.")
    assert drafter.paper
    assert dataclasses.replace(drafter) == drafter


def test_options_take_the_type_of_their_field() -> None:
    assert load_drafter("jacobi:num_speculative_tokens=3, refill=argmax") == Jacobi(
        num_speculative_tokens=3, refill="argmax"
    )
    text = "options:needed=1,either=none,flag=True,share=1e-2,mode=fast,model=a=b/c"
    assert load_drafter(text) == Options(1, None, True, 0.01, "fast", [], "a=b/c")
    assert load_drafter("options:needed=1,either=7").either == 7  # type: ignore[attr-defined]
    assert load_drafter("draft_model:model=none") == DraftModel()
    assert load_drafter("draft_model:model=a/b:c,num_speculative_tokens=6") == DraftModel("a/b:c", 6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("jacoby", "no drafter 'jacoby'. Did you mean 'jacobi'.*There are: .*jacobi, .*lookahead"),
        ("xyz", "no drafter 'xyz'. There are: .*suffix"),
        ("jacobi:blocks=2", "no option 'blocks'; it has: num_speculative_tokens, refill, seed"),
        ("none:num_speculative_tokens=2", "no option 'num_speculative_tokens'; it has: none"),
        ("jacobi:num_speculative_tokens", "needs a value, as in num_speculative_tokens=8"),
        ("jacobi:num_speculative_tokens=", "needs a value"),
        ("jacobi:num_speculative_tokens=two", "num_speculative_tokens must be a whole number, not 'two'"),
        ("jacobi:num_speculative_tokens=2.5", "num_speculative_tokens must be a whole number"),
        ("jacobi:num_speculative_tokens=0", "num_speculative_tokens must be at least 1, not 0"),
        ("jacobi:refill=noise", "refill must be 'draw' or 'argmax', not 'noise'"),
        ("options", "options needs needed, as in options:needed=VALUE"),
        ("options:needed=1,flag=1", "flag must be true or false"),
        ("options:needed=1,share=half", "share must be a number"),
        ("options:needed=1,either=few", "either must be a whole number or none"),
        ("combined", r"combined needs parts, as in combined:parts=\(DRAFTER\)\+\(DRAFTER\)"),
        ("combined:(jacoby)", "no drafter 'jacoby'. Did you mean 'jacobi'"),
        (
            "combined:(jacobi)+(jacobi:num_speculative_tokens=8)",
            "Jacobi is given twice with the same options",
        ),
        ("combined:(jacobi", "parentheses do not match"),
        ("combined:jacobi", r"a drafter goes in parentheses, as in combined:\(jacobi\)"),
        ("lookahead:ngram=1", "ngram must be at least 2"),
        ("prompt_lookup:min_ngram=9", "max_ngram must be at least 9, not 5"),
        ("prompt_lookup:min_confidence=nan", "min_confidence must be between 0 and 1"),
        ("draft_model:draws=wild", "draws must be 'coupled' or 'independent' or 'greedy'"),
        ("draft_model:num_speculative_tokens=0", "num_speculative_tokens must be at least 1"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(spec: str, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        load_drafter(spec)

"""Verifiers by name and option; lossy ones are marked."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from loose import Loose
from outpace.core import OutpaceError
from outpace.verify import VERIFIERS, load_verifier
from outpace.verify.match import Match


@pytest.mark.parametrize("name", VERIFIERS)
def test_every_verifier_loads_by_name(name: str) -> None:
    verifier = load_verifier(name)
    assert type(verifier) is VERIFIERS[name]
    assert verifier.name == name and verifier.paper
    assert not verifier.lossy and "lossy" not in str(verifier)
    assert dataclasses.replace(verifier) == verifier == pickle.loads(pickle.dumps(verifier))


def test_a_lossy_verifier_says_so() -> None:
    assert load_verifier("loose:Loose") == Loose() == load_verifier(Loose())
    assert str(Loose()) == "loose (lossy)" and str(Match()) == "match"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mach", "no verifier 'mach'. Did you mean 'match'.*There are: match, rejection"),
        ("guess", "no verifier 'guess'. There are: match"),
        ("match:beta=1", "match has no option 'beta'; it has: none"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(spec: str, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        load_verifier(spec)

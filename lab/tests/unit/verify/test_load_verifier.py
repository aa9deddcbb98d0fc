"""The laboratory's verifiers by name and option; lossy ones are marked."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest

from outpace.core import OutpaceError
from outpace.plugins import installed
from outpace.verify import load_verifier
from outpace_lab.verify.lossy import BiLD, TopBeta, Typical

LOSSY = {"typical", "top_beta", "bild", "lenient"}


@pytest.mark.parametrize("name", sorted({*LOSSY, "block", "spectr", "traversal"}))
def test_every_verifier_loads_by_name_and_lossy_ones_say_so(name: str) -> None:
    verifier = load_verifier(name)
    assert installed("verifiers")[name].load() is type(verifier)
    assert verifier.name == name and verifier.paper
    assert dataclasses.replace(verifier) == verifier == pickle.loads(pickle.dumps(verifier))
    assert verifier.lossy == ("lossy" in str(verifier)) == (name in LOSSY)
    assert (inspect.getdoc(verifier) or "").startswith("Lossy:") == verifier.lossy


def test_options_are_set_in_the_spec_string() -> None:
    assert load_verifier("typical:epsilon=0.3, delta=0.09") == Typical(epsilon=0.3, delta=0.09)
    assert load_verifier("top_beta:beta=5,tau=2") == TopBeta(5, 2.0)
    assert load_verifier("bild:threshold=1.5") == BiLD(1.5) == load_verifier(BiLD(1.5))
    assert str(Typical(0.3, 0.1)) == "typical:epsilon=0.3,delta=0.1 (lossy)"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("typical:epsilon", "needs a value, as in epsilon=0.09"),
        ("typical:epsilon=x", "epsilon must be a number"),
        ("typical:epsilon=0", "epsilon must be above 0 and at most 1, not 0.0"),
        ("typical:epsilon=nan", "epsilon must be above 0"),
        ("typical:delta=0", "delta must be a finite number above 0"),
        ("typical:delta=inf", "delta must be a finite number above 0"),
        ("top_beta:beta=0", "beta must be at least 1, not 0"),
        ("top_beta:tau=-1", "tau must be at least 0, not -1.0"),
        ("top_beta:tau=nan", "tau must be at least 0"),
        ("bild:threshold=-0.5", "threshold must be at least 0, not -0.5"),
        ("lenient:lenience=0", "lenience must be above 0 and at most 1, not 0.0"),
        ("lenient:lenience=1.5", "lenience must be above 0"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(spec: str, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        load_verifier(spec)

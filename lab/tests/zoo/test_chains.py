"""Families that take chains only, with the laboratory's methods."""

from __future__ import annotations

from outpace import Engine, SamplingParams
from outpace_lab.targets import ContrastiveTarget
from zoo.test_chains import NEW, TEXTS, decode, generated, target_of, tokens, trees


def test_look_ahead_embeddings() -> None:
    assert tokens(decode("bloom", "parallel_tokens")) == generated("bloom")


def test_spectr() -> None:
    assert tokens(decode("bloom", trees("bloom", generated("bloom")), verifier="spectr")) == generated(
        "bloom"
    )


def test_a_pair_of_which_one_takes_chains_only() -> None:
    target = ContrastiveTarget(target_of("mpt"), target_of("bloom"))
    assert target.why_chains_only
    params = SamplingParams(max_new_tokens=NEW)
    plain = tokens(Engine(target).generate(TEXTS, params))
    assert tokens(Engine(target, trees("mpt", plain), adaptive=False).generate(TEXTS, params)) == plain

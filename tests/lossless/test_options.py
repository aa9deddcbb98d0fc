"""Every option at its extremes, and every pair of options: the tokens of plain decoding, or refused at once.

The settings are generated from the registry of drafters. `make test` decodes with some of them, and
`make test-slow` with all values and all pairs of values, many pairs at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from typing import Any, Literal

import pytest

from lossless.conftest import Lab
from lossless.trained import with_trained
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters import DRAFTERS, load_drafter
from outpace.engine.engine import Engine
from outpace.testing.checks import Budgets

# What drafters need besides their options.
NEEDED = {
    "combined": "parts=(lookahead:window=2,ngram=3)+(prompt_lookup)",
    "dflash": "path={trained}",
    "either": "parts=(suffix)+(prompt_lookup)",
    "hydra": "path={trained}",
    "mtp": "path={trained}",
}
# These draft for a Gemma 4 alone, and from published files alone.
TRIED = [name for name in DRAFTERS if name not in ("assistant", "peagle")]
# Options that name what is drafted with, not how.
_NOT_TRIED = {"path", "model", "tokenizer", "target_tokenizer", "device", "seed", "draft", "inner", "parts",
              "draft_text"}  # fmt: skip
# Values of options whose types do not tell their ends.
_VALUES: dict[str, tuple[str, ...]] = {
    "bits": ("4", "8"),
    "draft_vocabulary": ("1", "1024"),
    "branching": ("1", "1x1x1", "4x2"),
    "acceptance": ("0.5", "0.9+0.5+0.1"),
    "layers": ("1", "5"),
    "skip": ("0", "1+2+3+4"),
}
# Options without which others are refused.
_COMPANY = ("min_ngram=1", "expand=2", "max_nodes=24", "layers=1", "num_speculative_tokens=1")
_LARGE = 24  # of whole numbers: more than the longest prompt has tokens
_FEW = 1  # settings of each drafter
# Nodes to verify per step, of a second engine: none, which is a plain step, a few, or all.
_BUDGETS = (0, 64, 0, 1, 64, 2)


def values(name: str, option: str, hint: Any) -> list[str]:
    """An option's values to try: all of a kind that has few, and the ends of a range."""
    if option in _VALUES:
        return list(_VALUES[option])
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    found: list[str] = []
    for kind in typing.get_args(hint) if union else (hint,):
        if kind is bool:
            found += ["true", "false"]
        elif typing.get_origin(kind) is Literal:
            found += typing.get_args(kind)
        elif kind is int:
            least = next(value for value in range(_LARGE) if accepted(name, option, value))
            assert least == 0 or not accepted(name, option, least - 1)
            found += [str(least), str(_LARGE)]
        elif kind is float:
            ends = [value for value in (0.0, 1e-3, 1.0, float(_LARGE)) if accepted(name, option, value)]
            found += [str(ends[0]), str(ends[-1])]
        elif kind is type(None):
            found.append("none")
    assert found, f"{name}: nothing is known of the option {option}"
    return found


def spec_of(name: str, *options: str) -> str:
    return ":".join(filter(None, [name, ",".join([*filter(None, [NEEDED.get(name)]), *options])]))


def accepted(name: str, option: str, value: Any) -> bool:
    """True if an option takes a value while the others have their defaults, or with one that it needs."""
    for others in ([], *([one] for one in _COMPANY if not one.startswith(option))):
        try:
            load_drafter(spec_of(name, f"{option}={value}", *others))
        except OutpaceError:
            continue
        return True
    return False


def choices(name: str) -> list[list[str]]:
    """The values to try, of each option of a drafter."""
    kind = type(load_drafter(spec_of(name)))
    hints = typing.get_type_hints(kind)
    return [
        [f"{field.name}={value}" for value in values(name, field.name, hints[field.name])]
        for field in dataclasses.fields(kind)
        if field.init and field.name not in _NOT_TRIED
    ]


def pairs_of(options: list[list[str]]) -> list[tuple[str, str]]:
    """Each pair of values of each two options."""
    return [pair for two in itertools.combinations(options, 2) for pair in itertools.product(*two)]


def settings(name: str) -> list[str]:
    """A drafter's spec with each value of each option, and with each pair of values."""
    options = choices(name)
    singles = [(one,) for one in itertools.chain(*options)]
    return [spec_of(name, *chosen) for chosen in [*singles, *pairs_of(options)]] or [name]


def covering(name: str, taken: Callable[[str], bool]) -> list[str]:
    """A drafter's spec with each value of each option, and few specs with all pairs of values, many in each.

    Args:
        taken: false for a spec that is refused. A pair that is refused without others stands alone.
    """
    options = choices(name)
    specs = [spec_of(name, one) for one in itertools.chain(*options)] or [name]
    pairs = pairs_of(options)
    left = set(map(frozenset, pairs))
    for pair in pairs:
        if frozenset(pair) not in left:
            continue
        chosen = list(pair)
        others = [option for option in options if not set(option) & set(pair)]
        for option in others if taken(spec_of(name, *pair)) else ():
            new = {one: sum(frozenset((one, other)) in left for other in chosen) for one in option}
            for one in sorted(option, key=new.__getitem__, reverse=True):
                if taken(spec_of(name, *chosen, one)):
                    chosen.append(one)
                    break
        left -= set(map(frozenset, itertools.combinations(chosen, 2)))
        specs.append(spec_of(name, *chosen))
    return specs


def some(name: str) -> list[str]:
    """Settings spread over all of a drafter's."""
    found = settings(name)
    return found[:: -(-len(found) // _FEW)]


@pytest.mark.parametrize(
    "spec", ["lookahead:window=0,ngram=2", *(spec for name in TRIED for spec in some(name))]
)
def test_some_settings(exact: Lab, spec: str) -> None:
    check(exact, spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_every_setting(exact: Lab, name: str) -> None:
    check_every(exact, name)


def check_every(lab: Lab, name: str, complete: Callable[[str], str] = str) -> None:
    """Check every setting of a drafter, of whose specs ``complete`` replaces what is in braces."""
    wrong, refused = [], []
    specs = covering(name, lambda spec: engines(lab, complete(spec)) is not None)
    for spec in specs:
        try:
            if not check(lab, complete(spec)):
                refused.append(spec)
        except Exception as error:
            wrong.append((spec, repr(error)))
    print(f"{name}: {len(specs)} settings, {len(refused)} refused")
    assert not wrong
    assert len(refused) < len(specs)


@pytest.mark.parametrize("name", TRIED)
def test_each_pair_is_covered(name: str) -> None:
    """A spec that is taken has it, or it stands alone."""

    def taken(spec: str) -> bool:
        try:
            load_drafter(spec)
        except OutpaceError:
            return False
        return True

    specs = covering(name, taken)
    for pair in pairs_of(choices(name)):
        holding = [spec for spec in specs if set(pair) <= set(re.split("[:,]", spec))]
        assert any(taken(spec) for spec in holding) or spec_of(name, *pair) in specs, pair


def check(lab: Lab, spec: str) -> bool:
    """Decode with a drafter; return False if it is refused when it is made, with a reason."""
    prompts, params, plain = decoded(lab)
    for engine in (made := engines(lab, spec)) or ():
        found = engine.generate(prompts, params)
        assert [one.tokens for one in found] == plain, spec
    return made is not None


def engines(lab: Lab, spec: str) -> list[Engine] | None:
    """Engines with and without a policy; None if the drafter is refused, with a reason."""
    try:
        drafter = load_drafter(with_trained(spec))
        return [Engine(lab.target, drafter, adaptive=policy) for policy in (False, Budgets(cycle(_BUDGETS)))]
    except OutpaceError as error:
        assert len(str(error)) > 20
        return None


@lru_cache(maxsize=1)
def decoded(lab: Lab) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts, greedy and sampled, and what plain decoding gives."""
    prompts = [lab.prompts[0][:18], [5], lab.prompts[1][:9] * 2]
    sampled = SamplingParams(max_new_tokens=14, temperature=0.7, seed=8, ignore_eos=True)
    params = [replace(sampled, temperature=0), sampled, sampled]
    found = Engine(lab.target).generate(prompts, params)
    return prompts, params, [one.tokens for one in found]

"""Speed of a method, and its ratio to plain decoding on the same prompts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from outpace.bench.run import Measured, MethodRuns
from outpace.bench.runs import MethodRun
from outpace.bench.statistics import interval, quartiles, ratio

# With five ratios, even the interval from the smallest to the largest contains the population median with
# probability below 95% (1 - 2 / 2**5), so no interval within it can reach 95%.
LEAST_GROUPS = 6


@dataclass(frozen=True)
class Sample:
    """Measurement of prompts decoded together, so that any two methods can be compared by pairs.

    Attributes:
        prompts: their names in the suite.
        tokens: total tokens of their answers, the mean over repeats.
        seconds: duration of each repeat, from the first answer's start to the last one's end.
    """

    prompts: tuple[str, ...]
    tokens: float
    seconds: list[float]


@dataclass(frozen=True)
class Speed:
    """Tokens per second on prompts, and the ratio to plain decoding on the same ones.

    Attributes:
        tokens_per_second: all tokens over all seconds, including prefill; the median over repeats.
        quartiles: quartiles of the groups' tokens per second.
        groups: number of separate measurements, fewer than prompts if prompts are decoded together.
        speedup: the median over groups of the ratio to plain decoding, for whole answers.
        interval: its 95% interval; None for fewer than ``LEAST_GROUPS`` groups.
        speedup_total: the ratio of the tokens per second of all groups together, in which long groups weigh
            more.
        decode_tokens_per_second, decode_speedup: the same without the first step; None if there is no other.
        prefill_seconds: the median time to the end of the first step.
        tau: tokens per step and sequence, including the target's own; None if steps are unknown.
    """

    prompts: int
    groups: int
    tokens_per_second: float
    quartiles: tuple[float, float, float]
    speedup: float
    interval: tuple[float, float] | None
    speedup_total: float
    decode_tokens_per_second: float | None
    decode_speedup: float | None
    prefill_seconds: float
    tau: float | None


def speed_of(measured: Measured, trace: MethodRuns, places: Seq[int]) -> Speed:
    plain = measured.traces[0]
    mine = [_whole(trace.runs[place]) for place in places]
    theirs = [_whole(plain.runs[place]) for place in places]
    whole = ratios(mine, theirs)
    later = [(_later(trace.runs[place]), _later(plain.runs[place])) for place in places]
    # A group whose answers were complete after the first step has nothing to compare after it.
    decoding = [(one, two) for one, two in later if one.timed and two.timed]
    decode = ratios([one for one, _ in decoding], [two for _, two in decoding])
    low, middle, high = quartiles([one.tokens / statistics.median(one.seconds) for one in mine])
    runs = [run for place in places for repeat in trace.runs[place] for run in repeat]
    steps = [run.steps for run in runs if run.steps is not None]
    return Speed(
        prompts=sum(len(measured.groups[place]) for place in places),
        groups=len(places),
        tokens_per_second=_rate(mine),
        quartiles=(low, middle, high),
        speedup=statistics.median(whole),
        interval=interval(whole) if len(whole) >= LEAST_GROUPS else None,
        speedup_total=ratio(_rate(mine), _rate(theirs)),
        decode_tokens_per_second=_rate([one for one, _ in decoding]) if decode else None,
        decode_speedup=statistics.median(decode) if decode else None,
        prefill_seconds=statistics.median(run.first_seconds for run in runs),
        tau=ratio(sum(run.tokens for run in runs), sum(steps)) if len(steps) == len(runs) else None,
    )


def samples_of(measured: Measured, trace: MethodRuns) -> list[Sample]:
    groups = zip(measured.groups, map(_whole, trace.runs), strict=False)  # fewer runs if it was dropped early
    return [Sample(tuple(item.id for item in group), *timed) for group, timed in groups]


class _Timed(NamedTuple):
    """Tokens of a group, the mean of its repeats (they may differ), and each repeat's seconds."""

    tokens: float
    seconds: list[float]

    @property
    def timed(self) -> bool:
        return self.tokens > 0 and min(self.seconds) > 0


def _whole(repeats: Seq[Seq[MethodRun]]) -> _Timed:
    return _Timed(
        statistics.fmean(sum(run.tokens for run in turns) for turns in repeats),
        [sum(run.seconds for run in turns) for turns in repeats],
    )


def _later(repeats: Seq[Seq[MethodRun]]) -> _Timed:
    """Time a group without the first step of each answer."""
    return _Timed(
        statistics.fmean(sum(run.tokens - run.first_tokens for run in turns) for turns in repeats),
        [sum(run.seconds - run.first_seconds for run in turns) for turns in repeats],
    )


def _rate(groups: Seq[_Timed]) -> float:
    """Tokens per second of all groups together, by the median of the repeats."""
    seconds = sum(statistics.median(group.seconds) for group in groups)
    return ratio(sum(group.tokens for group in groups), seconds)


def ratios(mine: Seq[_Timed | Sample], theirs: Seq[_Timed | Sample]) -> list[float]:
    """Ratio of the tokens per second in each group: the median over paired repeats."""
    return [
        statistics.median(
            (one.tokens / took) / (two.tokens / other)
            for took, other in zip(one.seconds, two.seconds, strict=True)
        )
        for one, two in zip(mine, theirs, strict=True)
    ]


def speed_of_categories(measured: Measured, trace: MethodRuns) -> dict[str, Speed]:
    """Compute the speed per category; empty if prompts of several categories were decoded together."""
    found: dict[str, list[int]] = {}
    for place, group in enumerate(measured.groups[: len(trace.runs)]):
        names = {item.category for item in group}
        if len(names) > 1:
            return {}
        found.setdefault(names.pop(), []).append(place)
    return {name: speed_of(measured, trace, places) for name, places in found.items()}

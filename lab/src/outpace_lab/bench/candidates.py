"""Candidates of ``outpace tune``: drafters by name, each with the options that matter for speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outpace.bench.runs import BASELINE
from outpace.drafters import load_drafter

# Candidates whose steps take longer than this many plain ones are omitted: few drafts yield as many tokens.
COSTLIEST = 4.0
_WIDTHS = (4, 8, 16, 32, 64)
_WINDOWS = ((2, 3, 2), (3, 3, 3), (4, 4, 4), (5, 5, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15))


@dataclass(frozen=True)
class Candidate:
    """A drafter's spec, and the maximum number of nodes of its drafts; None if the drafter decides."""

    spec: str
    nodes: int | None = None


def candidates(specs: Seq[str]) -> list[Candidate]:
    """List the candidates for a list of drafters, plain decoding first.

    A name without options yields the governed drafter and variants of several widths; a spec with options
    yields itself.

    Raises:
        OutpaceError: unknown drafter or option.
    """
    found = [Candidate(BASELINE)]
    for spec in specs:
        load_drafter(spec)
        found.append(Candidate(spec))
        if ":" not in spec:
            found.extend(_of_widths(spec))
    return list({one.spec: one for one in found}.values())


def _of_widths(name: str) -> Iterator[Candidate]:
    """Yield variants of a drafter, from narrow to wide."""
    if name == "lookahead":
        for window, ngram, guesses in _WINDOWS:
            nodes = (window + guesses) * (ngram - 1) - 1
            yield Candidate(f"lookahead:window={window},ngram={ngram},guesses={guesses}", nodes)
    elif name in ("prompt_lookup", "suffix"):
        for width in _WIDTHS[:-1]:
            for branches in (1, 4):
                yield Candidate(f"{name}:num_speculative_tokens={width},branches={branches}", width)
    elif name == "token_recycling":
        for width in _WIDTHS:
            yield Candidate(f"{name}:max_nodes={width}", width)
    elif name == "jacobi":
        for width in _WIDTHS[:3]:
            yield Candidate(f"{name}:num_speculative_tokens={width}", width)


def affordable(found: Seq[Candidate], seconds: Mapping[int, float]) -> list[Candidate]:
    """Select the candidates whose steps may pay, by the measured seconds of steps.

    Args:
        seconds: seconds of a step by the rows per prompt; 1 row is a plain step.
    """

    def costs(rows: int) -> float:
        """Seconds of the widest measured step with at most these rows, which is a lower bound."""
        return seconds[max(width for width in seconds if width <= rows)]

    limit = COSTLIEST * seconds[1]
    return [one for one in found if one.nodes is None or costs(1 + one.nodes) <= limit]

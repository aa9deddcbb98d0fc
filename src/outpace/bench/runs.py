"""Requests to methods and their runs: plain data, from which every figure of the report is computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

BASELINE = "none"


@dataclass(frozen=True)
class Request:
    """Prompts to be answered at once.

    Attributes:
        prompts: token ids of each.
        references: for each prompt, texts that its output may repeat, as token ids.
        max_new_tokens: tokens of each answer, at most.
        ends: an end-of-sequence token ends an answer; otherwise it is a token as any other, and every answer
            has ``max_new_tokens`` tokens.
        temperature: 0 is greedy.
        seeds: of each prompt's noise.
    """

    prompts: Seq[Seq[int]]
    references: Seq[Seq[Seq[int]]]
    max_new_tokens: int
    ends: bool
    temperature: float
    seeds: Seq[int]


@dataclass(frozen=True)
class Run:
    """Result of one method on one request.

    Attributes:
        outputs: tokens of each answer.
        seconds: from the request to the last token of all.
        first_seconds: until the end of the first step, which reads the prompts and emits their first tokens.
        first_tokens: number of tokens of that step.
        forwards: steps of the batch, each one forward of the target; None where unknown.
        steps: steps of each sequence, summed; None where unknown.
        drafted, accepted: numbers of drafted and of accepted tokens; None where unknown.
        accepted_at: number of steps that accepted a token at each depth of the draft, from depth 1 on.
        last_seconds: until the last token of each answer; empty where unknown.
        token_seconds: until each token of each answer; empty where unknown.
        draft_seconds, verify_seconds: after the first step, those of drafting and those of the target's
            forwards and the verifier; None where unknown.
    """

    outputs: list[list[int]]
    seconds: float
    first_seconds: float
    first_tokens: int
    forwards: int | None = None
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_at: list[int] = field(default_factory=list)
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    last_seconds: list[float] = field(default_factory=list)
    token_seconds: list[list[float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


class Method(Protocol):
    """A way of decoding.

    Attributes:
        name: in the report; a method of ours has its drafter's spec.
        peer: it is another library's.
        promised: its outputs are promised to equal plain decoding's.
        lossy: it changes the distribution of the output.
        verifier: name of what verifies its drafts; "" for a peer.
        adaptive: a governor decides how much it drafts.
        lone: takes one prompt at a time only.
    """

    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> bool: ...
    @property
    def promised(self) -> bool: ...
    @property
    def lossy(self) -> bool: ...
    @property
    def verifier(self) -> str: ...
    @property
    def adaptive(self) -> bool: ...
    @property
    def lone(self) -> bool: ...

    def begin(self, anew: bool = False) -> None:
        """Forget every output so far: a repeat of a suite begins.

        Args:
            anew: the suite itself begins, or another number of prompts at once. All else that was learned
                from texts is forgotten too; measurements of the machine may stay.
        """

    def run(self, request: Request) -> Run:
        """Decode."""

    def close(self) -> None:
        """Release what it holds."""


class Foreign:
    """Base of methods of other libraries."""

    peer = True
    lossy = False
    adaptive = False
    lone = False
    verifier = ""

    def __init__(self, name: str, promised: bool) -> None:
        self.name = name
        self.promised = promised

    def begin(self, anew: bool = False) -> None:
        """Forget nothing: nothing is kept from one prompt to the next."""

    def close(self) -> None:
        """Release nothing."""

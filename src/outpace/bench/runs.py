"""Requests to methods and their runs: plain data, from which every figure of the report is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType

BASELINE = "none"


@dataclass(frozen=True)
class PromptBatch:
    """Prompts to decode together.

    Attributes:
        prompts: token ids of each.
        references: for each prompt, texts that its output may repeat, as token ids.
        max_new_tokens: maximum number of tokens per answer.
        ends: an end-of-sequence token ends an answer; otherwise it is an ordinary token, and every answer has
            ``max_new_tokens`` tokens.
        temperature: 0 is greedy.
        seeds: seed of each prompt's noise.
        top_p: probability of the smallest set of tokens that sampling keeps; 1 keeps all.
    """

    prompts: Seq[Seq[int]]
    references: Seq[Seq[Seq[int]]]
    max_new_tokens: int
    ends: bool
    temperature: float
    seeds: Seq[int]
    top_p: float = 1.0


@dataclass(frozen=True)
class MethodRun:
    """Result of one method on one request.

    Attributes:
        outputs: tokens of each answer.
        seconds: time from the request to the last token.
        first_seconds: time to the end of the first step, which ends when all prompts are read and each answer
            has a token.
        first_tokens: number of tokens emitted until then.
        forwards: steps of the batch, each one forward of the target, except that the first may be several for
            long prompts; None if unknown.
        steps: steps of each sequence, summed; None if unknown.
        drafted, accepted: numbers of drafted and of accepted tokens; None if unknown.
        accepted_at: number of steps that accepted a token at each depth of the draft, from depth 1 on.
        last_seconds: time to the last token of each answer; empty if unknown.
        token_seconds: time to each token of each answer; empty if unknown.
        draft_seconds, verify_seconds: time of drafting, and of the target's forwards and the verifier, both
            without the first step; None if unknown.
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


class Method(ABC):
    """A decoding method.

    Attributes:
        name: name in the report; the drafter's spec for a method of outpace.
        promised: its outputs are promised to equal plain decoding's.
        peer: True for a method of another library.
        lossy: it changes the distribution of the output.
        verifier: name of its verifier; "" for a peer.
        adaptive: a governor decides how much it drafts.
        lone: it supports only one prompt at a time.
        versions: of the relevant packages in its own environment, by name; empty if it is in this process.
    """

    peer = True
    lossy = False
    verifier = ""
    adaptive = False
    lone = False
    versions: Mapping[str, str] = MappingProxyType({})

    def __init__(self, name: str, promised: bool) -> None:
        self.name = name
        self.promised = promised

    def begin(self, anew: bool = False) -> None:
        """Forget all outputs so far, at the start of a repeat of a suite; by default nothing is kept.

        Args:
            anew: the suite itself, or another batch size, begins: everything learned from texts is forgotten
                too; measurements of the machine may be kept.
        """
        del anew

    @abstractmethod
    def run(self, request: PromptBatch) -> MethodRun:
        """Decode."""

    def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Release its resources."""

"""Counts of a text's steps, and results."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

from outpace.core.errors import OutpaceError

if TYPE_CHECKING:
    import torch

FinishReason = Literal["eos", "stop", "length", "removed", "error"]
StopKind = Literal["end token", "stop token", "stop string", "criterion", "limit", "removed", "error"]
_REASONS: Mapping[StopKind, FinishReason] = MappingProxyType(
    {
        "end token": "eos",
        "stop token": "stop",
        "stop string": "stop",
        "criterion": "stop",
        "limit": "length",
        "removed": "removed",
        "error": "error",
    }
)
Promise = Literal["same bits", "same tokens", "same tokens but for near-ties", "not exact"]
PROMISES: tuple[Promise, ...] = get_args(Promise)  # from the strongest to the weakest


_METRIC = re.compile("[a-z][a-z0-9_]*")


@dataclass
class Stats:
    """Raw counts and seconds of one sequence; the ratios are properties.

    ``drafted`` counts every node sent to the target, ``accepted`` those kept in the output. In a batch the
    wall time of a step counts in full for each sequence in it. ``cached_tokens`` counts prompt tokens whose
    rows came from the prefix cache. ``extra`` contains a drafter's own counts.

    ``promise`` is how the tokens compare with plain decoding's: ``TargetModel.promise``, or None under a
    verifier that preserves no tokens; ``why_inexact`` is the reason if it is not "same bits".

    ``slow`` has the reasons why decoding is more than 1.5 times slower than it could be here, with remedies.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    seconds_prefill: float = 0.0
    seconds_draft: float = 0.0
    seconds_verify: float = 0.0
    seconds_rest: float = 0.0
    lossy: bool = False
    promise: Promise | None = None
    why_inexact: str | None = None
    slow: tuple[str, ...] = ()
    cached_tokens: int = 0
    extra: dict[str, int] = field(default_factory=dict)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per step (tau), the bonus token included; 1.0 for plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def seconds(self) -> float:
        return self.seconds_prefill + self.seconds_decode

    @property
    def seconds_decode(self) -> float:
        return self.seconds_draft + self.seconds_verify + self.seconds_rest

    def count(self, name: str, number: int) -> None:
        """Add to one of the drafter's own counts.

        Args:
            name: an identifier fit for metrics: lower-case letters, digits and underscores, a letter first.

        Raises:
            OutpaceError: the name is not such an identifier.
        """
        if name not in self.extra and not _METRIC.fullmatch(name):
            raise OutpaceError(
                f"{name!r} is not a valid name for a count: use lower-case letters, digits and underscores, "
                "a letter first, as in prompt_lookup_drafted"
            )
        self.extra[name] = self.extra.get(name, 0) + number

    def record(self, drafted: int, path_length: int, emitted: int) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += emitted
        self.drafted += drafted
        self.accepted += path_length
        missing = path_length - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(path_length):
            self.accepted_per_position[position] += 1


@dataclass(frozen=True, init=False, slots=True)
class TokenLogprobs:
    """Log probabilities at one output token, of the raw distribution: the token's and the highest ones.

    The highest are held as bytes, a sixth of the memory of a mapping: a server keeps those of whole answers.
    """

    logprob: float
    _tokens: bytes
    _values: bytes

    def __init__(self, logprob: float, top: Mapping[int, float]) -> None:
        object.__setattr__(self, "logprob", logprob)
        object.__setattr__(self, "_tokens", array("i", top.keys()).tobytes())
        object.__setattr__(self, "_values", array("d", top.values()).tobytes())

    @property
    def top(self) -> dict[int, float]:
        """The highest log probabilities by their tokens, from the highest."""
        return dict(zip(array("i", self._tokens), array("d", self._values), strict=True))

    def __repr__(self) -> str:
        return f"TokenLogprobs(logprob={self.logprob!r}, top={self.top!r})"

    @classmethod
    def of(cls, row: torch.Tensor, token: int, top: int) -> TokenLogprobs:
        """Select those of a token, and the highest ``top``, from a row of log probabilities [vocabulary]."""
        best = row.topk(min(top, len(row)))
        entries = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return cls(float(row[token]), entries)


@dataclass(frozen=True)
class StoppedBy:
    """What ended a text.

    Attributes:
        kind: a token of the model that ends its texts, one of ``stop_token_ids``, a stop string, a criterion
            such as a grammar whose text is complete, the limit of tokens, its removal, or an error.
        string: the stop string.
    """

    kind: StopKind
    string: str | None = None

    @property
    def reason(self) -> FinishReason:
        """The word for it in ``finish_reason``."""
        return _REASONS[self.kind]


@dataclass(frozen=True)
class Generation:
    """The result of one request.

    ``tokens`` includes the token that ends the output and those of a stop string; ``text`` has neither.

    If ``finish_reason`` is ``"error"``, ``error`` is the exception that ended the request, and ``tokens`` are
    those emitted before it.
    """

    tokens: list[int]
    stopped_by: StoppedBy
    seed: int
    stats: Stats
    text: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None

    @property
    def finish_reason(self) -> FinishReason:
        """What ended it, in a word."""
        return self.stopped_by.reason


@dataclass(frozen=True)
class StreamedToken:
    """One emitted token: its id, the step (from 1) that emitted it, and the text that may be shown now.

    ``text`` is "" without a tokenizer, and while a stop string or a character is incomplete. ``logprobs`` is
    None unless the parameters request log probabilities.
    """

    token: int
    step: int
    text: str = ""
    logprobs: TokenLogprobs | None = None

"""Shared types: a request's parameters, a draft, a verdict, counts, results, and the errors.

Imports nothing from outpace, so that every module may import it.
"""

from __future__ import annotations

import operator
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch

FinishReason = Literal["eos", "stop", "length", "removed", "error"]
Promise = Literal["same bits", "same tokens", "same tokens but for near-ties", "not exact"]
PROMISES: tuple[Promise, ...] = get_args(Promise)  # from the strongest to the weakest
LogitsProcessor = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


class OutpaceError(ValueError):
    """A mistake in the user's input; the message names the remedy."""


class UnsupportedModel(OutpaceError):
    """The model cannot serve as a target; the message names the reason."""


class ContextOverflow(OutpaceError):
    """A prompt is longer than the model's context."""


class RanksLost(OutpaceError):
    """One of the processes of a target has failed, which ended all of them and the engine.

    Attributes:
        here: whether this process was the first to notice.
    """

    here: bool = False


class NoTokenLeft(OutpaceError):
    """A row of logits leaves no token to choose."""


def out_of_memory(error: BaseException) -> bool:
    """True if an error means out of memory: Python's, a device's, or torch's on a CPU.

    The last is a plain RuntimeError that only its message distinguishes.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # compared by name, since torch may not be imported
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def load_extra(module: str, purpose: str, extra: str) -> Any:
    """Import a package that one of outpace's extras installs.

    Raises:
        OutpaceError: it cannot be imported; the message names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise OutpaceError(f"{purpose} needs {module}: pip install 'outpace[{extra}]'") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" :") if lines else type(error).__name__


def described(error: BaseException) -> str:
    """The type and message of an error; where it has no message, as an assert's, the line that raised it."""
    if str(error).strip() or error.__traceback__ is None:
        return repr(error)
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(raised.filename).name}:{raised.lineno}, {raised.line!r}"


def in_progress(call: FrameType) -> bool:
    """True if a call is on the stack of this thread, by its frame.

    This tells a call that has ended in whatever way; a note that it takes back itself would stay after an
    exception at a line before that.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


_INTEGERS = ("max_new_tokens", "top_k", "seed", "logprobs", "min_tokens")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_OPTIONAL = ("seed", "logprobs")
_LARGE = 1e30  # with which float32 can still be multiplied and divided


@dataclass(frozen=True)
class Speculation:
    """Choice of a request's drafter and draft size. A string in its place names the drafter.

    Attributes:
        drafter: a name among the engine's ``drafters``, "off" for plain decoding, None for the engine's
            default drafter.
        num_speculative_tokens: maximum number of nodes per draft, at least 0; None for no limit.
        memory: scope of what the drafter remembers of outputs (``suffix``, ``token_recycling``,
            ``combined``): None shares it among all requests of the engine, a name among the requests with
            the same name (those of one tenant, for example), "off" keeps it to this request. Only the 16
            most recently used names are kept.
    """

    drafter: str | None = None
    num_speculative_tokens: int | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        most = self.num_speculative_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            raise OutpaceError(f"num_speculative_tokens must be None or a number of at least 0, not {most!r}")
        if self.drafter is not None and not isinstance(self.drafter, str):
            raise OutpaceError(
                f"speculation names a drafter of the engine, as in Engine(..., drafters={{'name': ...}}), "
                f"or is 'off'; not {self.drafter!r}"
            )
        if self.memory is not None and (not isinstance(self.memory, str) or not self.memory):
            raise OutpaceError(f"memory must be None, 'off' or a name, not {self.memory!r}")


@dataclass(frozen=True)
class SamplingParams:
    """Options of decoding one sequence.

    The logits of a step are processed in transformers' order: ``logit_bias``, the three penalties,
    ``logits_processors``, ``temperature``, ``top_k``, ``top_p``, ``min_p``.

    Attributes:
        max_new_tokens: maximum number of tokens to emit, at least 0.
        temperature: 0 is greedy (the argmax of the processed logits).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose total probability reaches this, in (0, 1].
        min_p: drop tokens less probable than this times the most probable one, in [0, 1].
        repetition_penalty: over prompt and output (Keskar et al. 2019), above 0; 1 is off.
        presence_penalty: subtracted once from the logit of each token in the output.
        frequency_penalty: subtracted from a token's logit once per occurrence in the output.
        logit_bias: token id -> value added to its logit.
        seed: key of the noise, 0 <= seed < 2**64; None draws one, and the generation reports it. Prompts
            with the same seed use the same noise.
        stop: strings that end the output (the engine then needs a tokenizer). They are matched against
            the text without special tokens; put special tokens into ``stop_token_ids``. The one that is
            complete first ends the output, and is not in its text.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence tokens. The token
            that ends an output is among its tokens, but not in its text.
        ignore_eos: continue past the model's end-of-sequence tokens.
        min_tokens: number of tokens, at most ``max_new_tokens``, before which nothing of the above ends the
            output: end-of-sequence tokens, also ignored ones, and ``stop_token_ids`` are excluded, and stop
            strings that are complete by then do not count.
        logprobs: number of alternatives to report beside each emitted token's own log probability, from
            the raw distribution, before any processing; None reports no log probabilities.
        logits_processors: transformers' logits processors, called as
            ``p(input_ids[1, n], scores[1, vocabulary])`` exactly once per emitted token, in order.
        speculation: a ``Speculation``, or the name of one of the engine's drafters, or "off".
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    logits_processors: Seq[LogitsProcessor] = ()
    speculation: Speculation | str | None = None

    def __post_init__(self) -> None:
        self._convert()
        stop = self.stop
        self._check("max_new_tokens", self.max_new_tokens >= 0, "at least 0")
        most = self.max_new_tokens
        self._check("min_tokens", 0 <= self.min_tokens <= most, f"between 0 and max_new_tokens, {most},")
        self._check("temperature", 0 <= self.temperature <= _LARGE, f"between 0 and {_LARGE:g}")
        self._check("top_k", self.top_k >= 0, "at least 0 (0 keeps every token)")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        repetition = 1 / _LARGE <= self.repetition_penalty <= _LARGE
        self._check("repetition_penalty", repetition, f"above 0, between {1 / _LARGE:g} and {_LARGE:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, abs(getattr(self, name)) <= _LARGE, f"between {-_LARGE:g} and {_LARGE:g}")
        bias = (self.logit_bias or {}).values()
        self._check("logit_bias", all(value <= _LARGE for value in bias), f"numbers of at most {_LARGE:g}")
        self._check("seed", self.seed is None or 0 <= self.seed < 2**64, "None or at least 0 and below 2**64")
        self._check(
            "stop", all(isinstance(text, str) and text for text in stop), "strings that are not empty"
        )
        self._check("logprobs", self.logprobs is None or self.logprobs >= 0, "None or at least 0")

    def _convert(self) -> None:
        """Convert other libraries' numbers to Python's, a single stop string to a tuple, None to ``()``."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        try:
            values: dict[str, object] = {
                name: operator.index(getattr(self, name))
                for name in _INTEGERS
                if name not in _OPTIONAL or getattr(self, name) is not None
            }
            values |= {name: float(getattr(self, name)) for name in _NUMBERS}
            values["stop"] = tuple(stop or ())
            values["stop_token_ids"] = tuple(operator.index(token) for token in self.stop_token_ids or ())
            values["logits_processors"] = tuple(self.logits_processors or ())
            if not isinstance(self.speculation, Speculation):
                values["speculation"] = Speculation(self.speculation)
        except (TypeError, ValueError) as error:
            raise OutpaceError(f"a sampling parameter has a value of the wrong type: {error}") from error
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise OutpaceError(f"{name} must be {rule}, not {getattr(self, name)!r}")

    @property
    def drafts(self) -> Speculation:
        """``speculation`` as a ``Speculation``."""
        assert isinstance(self.speculation, Speculation)  # converted in __post_init__
        return self.speculation

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Draft:
    """A tree of guessed tokens under a sequence's last committed token, its root.

    Attributes:
        tokens: the guesses, n of them.
        parents: ``parents[i] < i``; -1 is the root.
        distributions: for a drafter that *samples*: parent node -> the full distribution, shape
            [vocabulary], from which that node's children were drawn. None for a drafter that *chooses*
            (n-gram, top-k, argmax): its tokens are point masses.
        replacement: whether siblings were drawn with replacement.
        riders: number of nodes at the end that are not guesses: they are in the forward for their logits
            and are never accepted. Their tokens may be ids beyond the vocabulary if the target was given
            embeddings for them. No guess is a descendant of a rider.
        chances: the drafter's estimate, per node, of the probability that it is accepted: above 0 and at
            most its parent's; None if the drafter has no estimates. ``combined`` weighs drafts by them.
    """

    tokens: Seq[int] = ()
    parents: Seq[int] = ()
    distributions: Mapping[int, torch.Tensor] | None = None
    replacement: bool = True
    riders: int = 0
    chances: Seq[float] | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        if self.chances is not None and len(self.chances) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.chances)} chances")
        count = len(self.parents)
        if count and not (min(self.parents) >= -1 and all(map(operator.lt, self.parents, range(count)))):
            raise ValueError(f"a node's parent must come before it, or be -1: {list(self.parents)}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def guesses(self) -> Draft:
        """The draft without its riders: what is verified."""
        if not self.riders:
            return self
        count = len(self) - self.riders
        chances = None if self.chances is None else self.chances[:count]
        return Draft(
            self.tokens[:count], self.parents[:count], self.distributions, self.replacement, chances=chances
        )


@dataclass(frozen=True, eq=False)
class Source:
    """An encoder's output for one input of an encoder-decoder model. Requests may share one.

    Attributes:
        states: the encoder's hidden states, shape [length, size].
        tokens: the encoder's input ids if encoder and decoder share a vocabulary, otherwise empty.
    """

    states: torch.Tensor
    tokens: Seq[int] = ()


@dataclass(frozen=True, eq=False)
class PromptStates(Source):
    """A prompt with images as a language model reads it: the inputs of its first layer, and their positions.

    Attributes:
        states: the embeddings of the whole prompt, shape [length, hidden size].
        positions: shape [axes, length], for a model with several axes of positions (Qwen2-VL: time, height,
            width); None if they count from 0. The text after the prompt continues each axis from its last.
        deep: what is added to the first layers' outputs (Qwen3-VL's features of images), shape [layers,
            length, hidden size], 0 where there is no image; None for other models.
    """

    positions: torch.Tensor | None = None
    deep: torch.Tensor | None = None


class Verdict:
    """A verifier's decision: the accepted nodes, the root's child first, and the tokens to emit.

    ``tokens`` contains the accepted nodes' tokens and then the bonus token, the target's own. The bonus is
    absent only if the sequence ended on an accepted token.
    """

    __slots__ = ("path", "tokens")

    def __init__(self, path: list[int], tokens: list[int]) -> None:
        self.path = path
        self.tokens = tokens


_METRIC = re.compile("[a-z][a-z0-9_]*")


@dataclass
class Stats:
    """Raw counts and seconds of one sequence; the ratios are properties.

    ``drafted`` counts every node sent to the target, ``accepted`` those kept in the output. In a batch the
    wall time of a step counts in full for each sequence in it. ``cached_tokens`` counts prompt tokens whose
    rows came from the prefix cache. ``extra`` contains a drafter's own counts.

    ``promise`` is how the tokens compare with plain decoding's: ``TargetModel.promise``, or None under a
    verifier that preserves no tokens; ``inexact`` is the reason if it is not "same bits".
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
    inexact: str = ""
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


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at one output token, of the raw distribution: the token's and the highest ones."""

    logprob: float
    top: dict[int, float]

    @classmethod
    def of(cls, row: torch.Tensor, token: int, top: int) -> TokenLogprobs:
        """Select those of a token, and the highest ``top``, from a row of log probabilities [vocabulary]."""
        best = row.topk(min(top, len(row)))
        entries = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return cls(float(row[token]), entries)


@dataclass(frozen=True)
class Generation:
    """The result of one request.

    ``tokens`` includes the token that ends the output and those of a stop string; ``text`` has neither.

    If ``finish_reason`` is ``"error"``, ``error`` is the exception that ended the request, and ``tokens`` are
    those emitted before it.
    """

    tokens: list[int]
    finish_reason: FinishReason
    seed: int
    stats: Stats
    text: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None


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

"""A request's parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any

from outpace.core.errors import OutpaceError
from outpace.core.structured import StructuredOutputs

if TYPE_CHECKING:
    import torch

LogitsProcessor = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
_INTEGERS = ("max_new_tokens", "n", "top_k", "seed", "logprobs", "min_tokens")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_OPTIONAL = ("seed", "logprobs")
_SEEDS = 2**64
_BOOLEANS = ("bool", "torch.bool")  # dtypes of NumPy's and torch's numbers
_LARGE = 1e30  # with which float32 can still be multiplied and divided


@dataclass(frozen=True)
class Speculation:
    """Choice of a request's drafter and draft size. A string in its place names the drafter.

    Attributes:
        drafter: a name among the engine's ``drafters``, "off" for plain decoding, None for the engine's
            default drafter.
        num_speculative_tokens: maximum number of nodes per draft, at least 0; None for no limit.
        memory: scope of what the drafter remembers of outputs (``suffix``, ``combined``): None
            shares it among all requests of the engine, a name among the requests with the same name (those
            of one tenant, for example), "off" keeps it to this request. Only the 16 most recently used
            names are kept.
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


def token_id(given: Any) -> int:
    """A token id as a Python integer; refuses True and False, which Python counts among them.

    Raises:
        TypeError: it is not an integer.
    """
    if isinstance(given, bool) or str(getattr(given, "dtype", "")) in _BOOLEANS:
        raise TypeError(f"{given!r} is no token id, which is an integer")
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{given!r} is no token id, which is an integer") from None


@dataclass(frozen=True)
class SamplingParams:
    """Options of decoding one sequence.

    The logits of a step are processed in transformers' order: ``logit_bias``, the three penalties,
    ``logits_processors``, ``temperature``, ``top_k``, ``top_p``, ``min_p``.

    Attributes:
        max_new_tokens: maximum number of tokens to emit, at least 0.
        max_tokens: OpenAI's and vLLM's name for ``max_new_tokens``; give one of them.
        n: number of outputs per prompt, at least 1; of ``generate`` alone. With a seed, the outputs have this
            seed and those that follow it.
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
        structured_outputs: a constraint of the text, which ends the output where nothing may follow. The
            engine then needs a tokenizer, and the extra ``outpace[serve]``.
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
    structured_outputs: StructuredOutputs | Mapping[str, object] | None = None
    n: int = 1
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            if self.max_new_tokens not in (SamplingParams.max_new_tokens, max_tokens):
                raise OutpaceError("give max_tokens or max_new_tokens, not both: they are one limit")
            object.__setattr__(self, "max_new_tokens", max_tokens)
        self._convert()
        stop = self.stop
        self._check("max_new_tokens", self.max_new_tokens >= 0, "at least 0")
        self._check("n", self.n >= 1, "at least 1")
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
        self._check(
            "seed", self.seed is None or 0 <= self.seed < _SEEDS, "None or at least 0 and below 2**64"
        )
        self._check(
            "stop", all(isinstance(text, str) and text for text in stop), "strings that are not empty"
        )
        called = all(map(callable, self.logits_processors))
        self._check("logits_processors", called, "functions of input_ids and scores")
        self._check("logprobs", self.logprobs is None or self.logprobs >= 0, "None or at least 0")
        constrained = self.structured_outputs is not None
        self._check("min_tokens", not (constrained and self.min_tokens), "0 with structured_outputs")

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
            values["stop_token_ids"] = tuple(map(token_id, self.stop_token_ids or ()))
            if self.logit_bias is not None:
                bias = dict(self.logit_bias)
                values["logit_bias"] = {token_id(token): float(value) for token, value in bias.items()}
            values["logits_processors"] = tuple(self.logits_processors or ())
            if not isinstance(self.speculation, Speculation):
                values["speculation"] = Speculation(self.speculation)
            if isinstance(self.structured_outputs, Mapping):
                values["structured_outputs"] = StructuredOutputs(**self.structured_outputs)  # type: ignore[arg-type]
        except OutpaceError:
            raise
        except (TypeError, ValueError) as error:
            raise OutpaceError(f"a sampling parameter has a value of the wrong type: {error}") from error
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise OutpaceError(f"{name} must be {rule}, not {getattr(self, name)!r}")

    def output(self, index: int) -> SamplingParams:
        """The parameters of one of several outputs, by its index: each has a seed of its own."""
        seed = None if self.seed is None else (self.seed + index) % _SEEDS
        return replace(self, n=1, seed=seed)

    @property
    def drafts(self) -> Speculation:
        """``speculation`` as a ``Speculation``."""
        assert isinstance(self.speculation, Speculation)  # converted in __post_init__
        return self.speculation

    @property
    def constraint(self) -> StructuredOutputs | None:
        """``structured_outputs`` as a ``StructuredOutputs``."""
        assert not isinstance(self.structured_outputs, Mapping)  # converted in __post_init__
        return self.structured_outputs

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

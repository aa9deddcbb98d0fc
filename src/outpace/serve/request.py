"""A parsed request, the same for all APIs: prompts as tokens, and decoding parameters."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace.core import SamplingParams, Speculation
from outpace.grammars.notations import Free
from outpace.loading.sampling import FROM_CONFIG, own_sampling
from outpace.serve.errors import Refused
from outpace.serve.fields import OpenAI, Sampled, Speculate
from outpace.serve.schemas import Lark
from outpace.serve.thinking import ReasoningPart
from outpace.targets.base import TargetModel

SEEDS = 2**64
_TOP = 1e-9  # a top_p that keeps only the most probable token
_ANSWER = 4096  # tokens, if neither request nor context sets a limit


@dataclass(frozen=True)
class ParsedRequest:
    """Prompts with their decoding parameters.

    Attributes:
        prompts: token ids, one list per prompt.
        params: parameters of the first choice of each prompt.
        n: number of choices per prompt.
        schema: the JSON schema of the text, or its grammar; None for any text.
        prediction: a text that the output may repeat, as token ids.
        salt: requests with the same salt share cached rows and drafters' memory.
        trace: record the steps.
        reasoning: that which the answer may begin with, before what the schema allows; None for none.
        source: the images of the only prompt, as ``Engine.add`` takes them; None if there are none.
        constrained: the field that the schema comes from, for errors.
    """

    prompts: Seq[Seq[int]]
    params: SamplingParams
    n: int = 1
    schema: dict[str, Any] | Lark | Free | None = None
    prediction: Seq[int] | None = None
    salt: str | None = None
    trace: bool = False
    source: Any = None
    reasoning: ReasoningPart | None = None
    constrained: str = ""

    def choice(self, index: int) -> SamplingParams:
        """The parameters, with the seed, of the choice with this index among the choices of all prompts."""
        return self.params.output(index)


@dataclass(frozen=True)
class Defaults:
    """Defaults from the model's generation_config.

    Attributes:
        values: values by the names of ``SamplingParams``.
        context: maximum number of tokens of prompt and answer; None for no limit.
        cut: an answer's limit beyond the context is cut to what the prompt leaves of it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    cut: bool = True

    @classmethod
    def of(cls, target: TargetModel, cut: bool = True) -> Defaults:
        """Defaults of a target, if it has a transformers model."""
        return cls(own_sampling(target), target.context, cut)

    def params(self, body: Sampled, **more: Any) -> SamplingParams:
        """Sampling parameters of a request.

        Args:
            more: further fields of ``SamplingParams``; None leaves one at its default.
        """
        asked = {name: getattr(body, name, None) for name in FROM_CONFIG}
        params = {"temperature": 1.0, **self.values, **{k: v for k, v in asked.items() if v is not None}}
        params["top_p"] = max(_TOP, params.get("top_p", 1.0))  # 0 is OpenAI's value for the best token
        params["top_k"] = max(0, params.get("top_k", 0))  # -1 is vLLM's value for all
        params |= {name: value for name, value in more.items() if value is not None}
        return SamplingParams(**params, speculation=speculation(body.speculation))

    def most_tokens(self, prompts: Seq[Seq[int]], asked: int | None) -> int:
        """Maximum number of tokens to emit.

        Raises:
            Refused: the prompt leaves nothing of the context for an answer, or less than was asked for and
                must not be cut.
        """
        longest = max((len(prompt) for prompt in prompts), default=0)
        if self.context is None:
            return _ANSWER if asked is None else asked
        left = self.context - longest
        least = 0 if asked == 0 else 1 if asked is None or self.cut else asked
        if left < least:
            answer = "" if not least else f" and at least {least} of the answer"
            raise Refused(
                400,
                f"this model's maximum context length is {self.context} tokens, but {longest + least} "
                f"were requested: {longest} of the prompt{answer}; shorten the prompt"
                f"{', or ask for fewer' if least > 1 else ''}",
                code="context_length_exceeded",
            )
        return left if asked is None else min(left, asked)


def openai_params(body: OpenAI, defaults: Defaults, most: int, logprobs: int | None) -> SamplingParams:
    """Sampling parameters of a request to chat or completions.

    Raises:
        Refused: there is a wrong bias, or more tokens must be emitted than may be.
    """
    if body.min_tokens > most:
        message = f"min_tokens is {body.min_tokens}, but at most {most} tokens are emitted; lower it"
        raise Refused(400, message, "min_tokens")
    return defaults.params(
        body,
        max_new_tokens=most,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_bias(body.logit_bias),
        seed=None if body.seed is None else body.seed % SEEDS,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        logprobs=logprobs,
    )


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    wrong = [token for token in bias or () if not (token.isascii() and token.isdigit() and len(token) < 10)]
    if wrong:
        named = ", ".join(repr(token[:100]) for token in wrong[:8])
        raise Refused(400, f"the keys of logit_bias are token ids, which {named} is not", "logit_bias")
    return None if bias is None else {int(token): value for token, value in bias.items()}


def speculation(asked: str | bool | Speculate | None) -> Speculation:
    """Parse ``speculation``: false and "off" disable drafting, true selects the server's drafter."""
    if asked is False:
        return Speculation("off")
    if asked is None or asked is True:
        return Speculation()
    if isinstance(asked, str):
        return Speculation(asked)
    return Speculation(asked.drafter, asked.num_speculative_tokens, asked.memory)


def check_stream(body: OpenAI) -> None:
    """Refuse options of chat and completions that need a stream.

    Raises:
        Refused: one is given for a response that is not streamed.
    """
    if body.stream_options is not None and not body.stream:
        raise Refused(400, "stream_options needs stream: true", "stream_options")
    if body.trace and not body.stream:
        raise Refused(400, "trace needs stream: true", "trace")


def salted(tenant: str | None, body: OpenAI) -> str | None:
    """The salt of a request, from its key and its ``cache_salt``."""
    return None if tenant is None and body.cache_salt is None else f"{tenant}:{body.cache_salt}"

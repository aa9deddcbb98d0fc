"""Requests to an engine: checked before anything is decoded, then turned into sequences."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from outpace.cache import Cache
from outpace.core import (
    ContextOverflow,
    OutpaceError,
    PromptStates,
    SamplingParams,
    load_extra,
)
from outpace.core.parameters import token_id
from outpace.draws.noise import Key
from outpace.draws.sampling import NoEnd
from outpace.engine.active import Drafting
from outpace.engine.observer import Observer
from outpace.engine.parts import need_logits
from outpace.engine.slow import reasons
from outpace.policy.plan import Policy
from outpace.reading import Messages, chat_ids, is_conversation
from outpace.reading import token_ids as ids_of_text
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel
from outpace.text import TextStream, Tokenizer
from outpace.verify import Verifier

if TYPE_CHECKING:
    from outpace.grammars.matching import Constraints

T = TypeVar("T")
Prompt = str | Seq[int] | Messages


@dataclass(frozen=True)
class Requests:
    """Factory of sequences from the requests to one engine; invalid ones are refused.

    Attributes:
        target, verifier, tokenizer, observer: the engine's parts.
        draftings: its drafters, by the names that requests use.
        clock: the engine's clock.
    """

    target: TargetModel
    verifier: Verifier
    tokenizer: Tokenizer | None
    draftings: Mapping[str | None, Drafting]
    observer: Observer | None
    clock: Callable[[], float]

    def sequence(
        self,
        cache: Cache,
        prompt: Prompt,
        params: SamplingParams | None = None,
        criteria: Callable[[list[int]], bool] | None = None,
        references: Seq[Seq[int]] = (),
        output: Seq[int] = (),
        source: Any = None,
        priority: int = 0,
        salt: str | None = None,
        client: str = "",
    ) -> Sequence:
        """Check a request and return its sequence, which is not in the batch yet.

        Args:
            cache: the cache for its rows, which limits its length if static. The other arguments are those of
                ``Engine.add``.

        Raises:
            ContextOverflow: the prompt is longer than the context. OutpaceError: the request is invalid.
        """
        target, params = self.target, params or SamplingParams()
        if params.n != 1:
            raise OutpaceError(
                f"n={params.n} is for generate(), which returns n outputs per prompt; leave it out"
            )
        tokens, source = self._read(prompt, source)
        check_prompt(tokens, target)
        check_ids(params, target)
        ending = not_ending_early(params, len(tokens), target)
        params, criteria = self._constrained(ending, len(tokens), criteria)
        check_processors(params, self.verifier)
        check_logits(params, target)
        drafting = drafting_of(params, self.draftings)
        check_seed(params, self.verifier, drafting.policy, self.observer)
        text = self._text(params)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        texts = reference_ids(references, target, drafting.drafter.reads_references)
        began = self.clock()
        encoded = target.encode(source)
        if isinstance(encoded, PromptStates) and len(encoded.states) != len(tokens):
            raise OutpaceError(
                f"the source is of a prompt of {len(encoded.states)} tokens, and the prompt has "
                f"{len(tokens)}; give the source's own input_ids as the prompt"
            )
        sequence = Sequence(
            tokens,
            params,
            Key(seed, coupled=self.verifier.coupled),
            limit=output_limit(len(tokens), params, target, cache),
            eos_token_ids=frozenset() if params.ignore_eos else target.eos_token_ids,
            text=text,
            criteria=criteria,
            references=texts,
            output=output_ids(output, target),
            source=encoded,
            priority=priority,
            salt=salt,
            client=client,
        )
        sequence.stats.slow = reasons(target, drafting.drafter, drafting.policy, self.verifier)
        sequence.stats.lossy = self.verifier.lossy
        if self.verifier.keeps_tokens(params.greedy):
            sequence.stats.promise, sequence.stats.why_inexact = target.promise, target.why_inexact
        sequence.stats.seconds_prefill = self.clock() - began
        return sequence

    def _constrained(
        self,
        params: SamplingParams,
        length: int,
        criteria: Callable[[list[int]], bool] | None,
    ) -> tuple[SamplingParams, Callable[[list[int]], bool] | None]:
        """The parameters of an output after a prompt of this length, with its constraint, and its end."""
        if (wanted := params.constraint) is None:
            return params, criteria
        load_extra("llguidance", "structured_outputs", "serve")
        grammar = self._constraints.of(wanted, length)

        def ended(tokens: list[int]) -> bool:
            return grammar.ended(tokens) or (criteria is not None and criteria(tokens))

        # It comes first: what the other processors exclude is excluded from what the grammar allows
        return replace(params, logits_processors=(grammar, *params.logits_processors)), ended

    @cached_property
    def _constraints(self) -> Constraints:
        from outpace.grammars.matching import Constraints

        if self.tokenizer is None:
            raise OutpaceError(
                "structured_outputs need a tokenizer: Engine(target, drafter, tokenizer=tokenizer)"
            )
        return Constraints(self.tokenizer, self.target.vocabulary, self.target.eos_token_ids)

    def _read(self, prompt: Prompt, source: Any) -> tuple[list[int], Any]:
        """A prompt's token ids and its source, which of a model with an encoder is the text."""
        tokenizer: Any = self.tokenizer
        if not isinstance(prompt, str) and not is_conversation(prompt):
            return token_ids(prompt), source
        if not callable(tokenizer):
            raise OutpaceError(
                "a prompt must be a list of token ids: to take texts and messages, the engine needs a "
                "tokenizer, Engine(target, drafter, tokenizer=tokenizer)"
            )
        if not isinstance(prompt, str):
            return chat_ids(tokenizer, self.target.name, prompt), source
        most = None if self.target.has_encoder else self.target.context
        ids = ids_of_text(tokenizer, prompt, most=most)
        return self.target.parts(ids) if source is None else (ids, source)

    def _text(self, params: SamplingParams) -> TextStream | None:
        """The decoder of an output, if there is a tokenizer."""
        if self.tokenizer is not None:
            return TextStream(self.tokenizer, params.stop, params.min_tokens)
        if params.stop:
            raise OutpaceError("stop strings need a tokenizer: Engine(target, drafter, tokenizer=tokenizer)")
        return None


def check_logits(params: SamplingParams, target: TargetModel) -> None:
    """Refuse what needs logits of a target that gives none.

    Raises:
        OutpaceError: there is something.
    """
    if params.logits_processors:
        need_logits(target, "logits_processors, of which min_tokens is one")
    if params.logprobs is not None:
        need_logits(target, "logprobs")


def drafting_of(params: SamplingParams, draftings: Mapping[str | None, Drafting]) -> Drafting:
    """The drafter of a request.

    Raises:
        OutpaceError: the engine has no drafter of that name.
    """
    name = params.drafts.drafter
    if name not in draftings:
        known = ", ".join(repr(one) for one in draftings if one is not None)
        raise OutpaceError(
            f"speculation names {name!r}, but this engine has: {known}; make it with "
            f"drafters={{{name!r}: ...}}"
        )
    return draftings[name]


def prompts_of(given: Prompt | Seq[Prompt]) -> Seq[Prompt]:
    """A list of prompts; a text or a conversation alone is one of them."""
    alone = isinstance(given, str) or is_conversation(given)
    return cast(Seq[Prompt], [given] if alone else given)


def params_of_each(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise OutpaceError(
            f"{count} prompts but {len(params)} SamplingParams; give one for all, or one for each"
        )
    return list(params)


def one_each(given: Seq[T] | None, absent: T, count: int, what: str) -> Seq[T]:
    """The values given for N prompts; ``absent`` for each if none were given."""
    if given is None:
        return [absent] * count
    if len(given) != count:
        raise OutpaceError(f"{count} prompts but {len(given)} {what}; give one for each prompt")
    return given


def reference_ids(
    references: Seq[Seq[int]], target: TargetModel, read: bool = True
) -> tuple[tuple[int, ...], ...]:
    """The references as plain integers.

    Args:
        read: whether the drafter reads references.

    Raises:
        OutpaceError: one is not a list of token ids of the target's vocabulary, or the drafter reads none.
    """
    if len(references) and not read:
        raise OutpaceError(
            "this drafter does not read references; use drafter='reference', or leave them out"
        )
    if any(not hasattr(text, "__iter__") for text in references):
        raise OutpaceError("references must be a list of texts, each a list of token ids")
    texts = tuple(tuple(token_ids(text)) for text in references)
    for text in texts:
        check_vocabulary(text, target, "references: ")
    return texts


def output_ids(output: Seq[int], target: TargetModel) -> list[int]:
    """Output emitted earlier, as plain integers.

    Raises:
        OutpaceError: it is not a list of token ids of the target's vocabulary.
    """
    tokens = token_ids(output)
    check_vocabulary(tokens, target, "output: ")
    return tokens


# They can be iterated over, but in no meaningful order.
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)


def token_ids(prompt: Any) -> list[int]:
    """A prompt as plain integers, since elements of tensors and arrays hash and compare differently."""
    if isinstance(prompt, _NO_LISTS) or not hasattr(prompt, "__iter__"):
        raise OutpaceError(
            f"a prompt must be a list of token ids, a text or messages, not a {type(prompt).__name__}; "
            "generate() takes a list of prompts"
        )
    try:
        tokens = list(prompt)
        return tokens if set(map(type, tokens)) <= {int} else list(map(token_id, tokens))
    except TypeError as error:
        raise OutpaceError(f"a prompt must be a list of token ids: {error}") from error


def check_vocabulary(tokens: Iterable[int], target: TargetModel, where: str = "") -> None:
    outside = next((token for token in tokens if not 0 <= token < target.vocabulary), None)
    if outside is not None:
        raise OutpaceError(f"{where}token {outside} is outside the model's vocabulary of {target.vocabulary}")


def check_ids(params: SamplingParams, target: TargetModel) -> None:
    check_vocabulary(params.logit_bias or (), target, "logit_bias: ")
    check_vocabulary(params.stop_token_ids, target, "stop_token_ids: ")


def not_ending_early(params: SamplingParams, prompt_length: int, target: TargetModel) -> SamplingParams:
    """The parameters with a processor that keeps ``min_tokens``, if it is given."""
    ends = tuple(sorted({*params.stop_token_ids, *target.eos_token_ids}))
    if not (params.min_tokens and ends):
        return params
    keep = NoEnd(prompt_length, params.min_tokens, ends)
    return replace(params, logits_processors=(*params.logits_processors, keep))


def check_processors(params: SamplingParams, verifier: Verifier) -> None:
    if params.logits_processors and verifier.ahead:
        raise OutpaceError(
            f"logits_processors see emitted tokens only, and min_tokens is one, but "
            f"verifier={verifier.name!r} looks further ahead; use verifier='match' or 'rejection'"
        )


def check_seed(
    params: SamplingParams, verifier: Verifier, policy: Policy | None, observer: Observer | None = None
) -> None:
    """Refuse a seed whose tokens would depend on the clock."""
    if params.seed is None or verifier.keeps_tokens(params.greedy):
        return
    if policy is not None and policy.timed:
        raise OutpaceError(
            f"under verifier={verifier.name!r} the tokens of a seed depend on the length of drafts, and "
            "adaptive=True chooses it by the clock; use verifier='match', adaptive=False, or no seed"
        )
    if observer is not None and observer.timed:
        raise OutpaceError(
            f"under verifier={verifier.name!r} the tokens of a seed depend on the drafts, and what a "
            "drafter learns in the background depends on the clock; use verifier='match', or no seed"
        )


def check_prompt(prompt: Seq[int], target: TargetModel) -> None:
    if not len(prompt):
        raise OutpaceError("the prompt is empty: it needs at least one token (the model's BOS token will do)")
    check_vocabulary(prompt, target)
    if target.context is not None and len(prompt) > target.context:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens, the model's context {target.context}; shorten the prompt"
        )


def output_limit(prompt_length: int, params: SamplingParams, target: TargetModel, cache: Cache) -> int:
    """Maximum number of tokens to emit: by ``max_new_tokens``, the context, and the rows of a static cache.

    Raises:
        OutpaceError: a slot of the static cache has too few rows for the prompt, or the cache too few for the
            request.
    """
    limit = params.max_new_tokens
    if target.context is not None:
        limit = min(limit, target.context - prompt_length)
    if cache.max_length is not None:
        if prompt_length > cache.max_length:
            raise OutpaceError(
                f"the prompt has {prompt_length} tokens, a slot of the static cache {cache.max_length} rows; "
                "shorten the prompt, or make the engine with longer slots"
            )
        # The last token is never fed, so it needs no row.
        limit = min(limit, cache.max_length + 1 - prompt_length)
    elif cache.capacity is not None and cache.cost(prompt_length + limit - 1) > cache.capacity:
        raise OutpaceError(
            f"a prompt of {prompt_length} tokens and an answer of up to {limit} do not fit into the "
            f"{cache.capacity} rows of the cache; lower max_new_tokens, or make the engine with more memory"
        )
    return limit

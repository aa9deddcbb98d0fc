"""What is asked of the engine, checked before anything is decoded."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Seq
from typing import Any

from outpace.cache import KVCache
from outpace.core import ContextOverflow, OutpaceError, SamplingParams
from outpace.governor import Policy
from outpace.observer import Observer
from outpace.targets.base import TargetModel
from outpace.verify import Verifier


def one_each(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise OutpaceError(
            f"{count} prompts but {len(params)} SamplingParams; give one for all, or one for each"
        )
    return list(params)


def references_of_each(references: Seq[Seq[Seq[int]]] | None, count: int) -> Seq[Seq[Seq[int]]]:
    if references is None:
        return [()] * count
    if len(references) != count:
        raise OutpaceError(
            f"{count} prompts but {len(references)} lists of references; give one list for each prompt"
        )
    return references


def sources_of_each(sources: Seq[Any] | None, count: int) -> Seq[Any]:
    if sources is None:
        return [None] * count
    if len(sources) != count:
        raise OutpaceError(f"{count} prompts but {len(sources)} sources; give one for each prompt")
    return sources


def reference_ids(
    references: Seq[Seq[int]], target: TargetModel, read: bool = True
) -> tuple[tuple[int, ...], ...]:
    """The references as plain integers.

    Args:
        read: whether the drafter reads any.

    Raises:
        OutpaceError: one is not a list of token ids of the target's vocabulary, or nobody reads them.
    """
    if len(references) and not read:
        raise OutpaceError(
            "this drafter does not read references; use drafter='reference', or leave them out"
        )
    if any(not hasattr(text, "__iter__") for text in references):
        raise OutpaceError("references are a list of texts, each a list of token ids")
    texts = tuple(tuple(token_ids(text)) for text in references)
    outside = [token for text in texts for token in text if not 0 <= token < target.vocabulary]
    if outside:
        raise OutpaceError(
            f"references: token {outside[0]} is outside the model's vocabulary of {target.vocabulary}"
        )
    return texts


def output_ids(output: Seq[int], target: TargetModel) -> list[int]:
    """Output that was there before, as plain integers.

    Raises:
        OutpaceError: it is not a list of token ids of the target's vocabulary.
    """
    tokens = token_ids(output)
    outside = [token for token in tokens if not 0 <= token < target.vocabulary]
    if outside:
        raise OutpaceError(
            f"output: token {outside[0]} is outside the model's vocabulary of {target.vocabulary}"
        )
    return tokens


def token_ids(prompt: Any) -> list[int]:
    """A prompt as plain integers: numbers of tensors and arrays hash and compare in ways of their own."""
    if isinstance(prompt, str) or not hasattr(prompt, "__iter__"):
        raise OutpaceError(
            f"a prompt is a list of token ids, not a {type(prompt).__name__}; "
            "generate() takes a list of prompts"
        )
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise OutpaceError(f"a prompt is a list of token ids: {error}") from error


def check_ids(params: SamplingParams, target: TargetModel) -> None:
    for name in ("logit_bias", "stop_token_ids"):
        outside = [token for token in getattr(params, name) or () if not 0 <= token < target.vocabulary]
        if outside:
            raise OutpaceError(
                f"{name}: token {outside[0]} is outside the model's vocabulary of {target.vocabulary}"
            )


def check_processors(params: SamplingParams, verifier: Verifier) -> None:
    if params.logits_processors and verifier.ahead:
        raise OutpaceError(
            f"logits_processors see emitted tokens only, and verifier={verifier.name!r} looks further ahead; "
            "use verifier='match' or 'rejection'"
        )


def adapts(drafter: Any, verifier: Verifier) -> bool:
    """Whether a governor decides how much is drafted where nobody said so.

    It does for a drafter that is given by its name alone: whoever gives options or an instance means them.
    And only under a verifier that it cannot change the tokens of.
    """
    return (
        isinstance(drafter, str) and ":" not in drafter and drafter.strip() != "none" and verifier.invariant
    )


def check_seed(
    params: SamplingParams, verifier: Verifier, policy: Policy | None, observer: Observer | None = None
) -> None:
    """Refuse a seed whose tokens would depend on the clock."""
    if verifier.invariant or params.seed is None or (params.greedy and not verifier.lossy):
        return
    if policy is not None and policy.timed:
        raise OutpaceError(
            f"under verifier={verifier.name!r} the tokens of a seed depend on how many were drafted, and "
            "adaptive=True decides that by the clock; use verifier='match', adaptive=False, or no seed"
        )
    if observer is not None and observer.timed:
        raise OutpaceError(
            f"under verifier={verifier.name!r} the tokens of a seed depend on what was drafted, and what a "
            "drafter learns in the background depends on the clock; use verifier='match', or no seed"
        )


def check_prompt(prompt: Seq[int], target: TargetModel) -> None:
    if not len(prompt):
        raise OutpaceError("the prompt is empty: it needs at least one token (the model's BOS token will do)")
    outside = [token for token in prompt if not 0 <= token < target.vocabulary]
    if outside:
        raise OutpaceError(f"token {outside[0]} is outside the model's vocabulary of {target.vocabulary}")
    if target.context is not None and len(prompt) > target.context:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens, the model's context {target.context}; shorten the prompt"
        )


def output_limit(prompt_length: int, params: SamplingParams, target: TargetModel, cache: KVCache) -> int:
    """Tokens that may be emitted: by ``max_new_tokens``, the context, and the rows of a static cache.

    Raises:
        OutpaceError: a slot of the static cache has too few rows for the prompt.
    """
    limit = params.max_new_tokens
    if target.context is not None:
        limit = min(limit, target.context - prompt_length)
    if cache.static:
        if prompt_length > cache.length:
            raise OutpaceError(
                f"the prompt has {prompt_length} tokens, a slot of the static cache {cache.length} rows; "
                "shorten the prompt, or make the engine with a greater length"
            )
        # The last token is never fed, so it needs no row.
        limit = min(limit, cache.length + 1 - prompt_length)
    return limit

"""What is asked of the engine, checked before anything is decoded."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Seq
from typing import Any

from outpace.core import ContextOverflow, OutpaceError, SamplingParams
from outpace.targets.base import TargetModel


def one_each(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise OutpaceError(
            f"{count} prompts but {len(params)} SamplingParams; give one for all, or one for each"
        )
    return list(params)


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

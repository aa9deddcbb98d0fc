"""How answers of a loaded model are drawn where the caller does not say."""

from __future__ import annotations

from typing import Any

from outpace.core import OutpaceError, SamplingParams, check_known
from outpace.targets import TargetModel

# What a model's generation config may say of sampling, by the names of ``SamplingParams``.
FROM_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def own_sampling(target: TargetModel) -> dict[str, Any]:
    """The sampling that a model's generation config sets; empty if it sets none, or there is no config."""
    config = getattr(target.model, "generation_config", None)
    values = {name: getattr(config, name, None) for name in FROM_CONFIG}
    return {name: value for name, value in values.items() if value is not None}


def sampling_of_chat(target: TargetModel, given: dict[str, Any]) -> SamplingParams:
    """Parameters of a chat: what is given, before what the model's config sets; greedy if it sets nothing."""
    own = own_sampling(target)
    own = {"temperature": 1.0, **own} if own else {}
    if {**own, **given}.get("temperature", 0) == 0:
        own = {name: value for name, value in own.items() if name == "repetition_penalty"}
    return made({**own, **given})


def params_of(params: Any, given: dict[str, Any]) -> Any:
    """The parameters of a call: ``params``, or those made of their fields.

    Raises:
        OutpaceError: both are given, or there is no such field.
    """
    if params is not None and given:
        raise OutpaceError(f"give params or {next(iter(given))}, not both: it is a field of SamplingParams")
    return made(given) if params is None else params


def made(given: dict[str, Any]) -> SamplingParams:
    """Sampling parameters from their fields by name."""
    check_known("SamplingParams", given, SamplingParams.__dataclass_fields__)
    return SamplingParams(**given)

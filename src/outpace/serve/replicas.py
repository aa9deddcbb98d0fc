"""Choice of a replica: requests that begin alike share one, whose prefix cache has their beginning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json

_PLACES = ("system", "instructions", "messages", "prompt", "input")  # where a request's text is, in its order


def read(body: bytes, length: int) -> tuple[str | None, str]:
    """The model that a request names, and the beginning of its text.

    A conversation counts up to its first turn of the user, so that all its requests begin alike. Bodies that
    are not a JSON object have neither; a replica refuses them.

    Args:
        length: characters of the beginning, counted in JSON; 0 for none.
    """
    try:
        found = from_json(body)
    except ValueError:
        return None, ""
    if not isinstance(found, dict):
        return None, ""
    model = found.get("model")
    begins = [_opening(found[name]) for name in _PLACES if name in found]
    beginning = json.dumps(begins)[:length] if begins else ""
    return (model if isinstance(model, str) else None), beginning


def _opening(text: Any) -> Any:
    if not isinstance(text, list):
        return text
    for number, turn in enumerate(text):
        if isinstance(turn, dict) and turn.get("role") == "user":
            return text[: number + 1]
    return text


def preferred(key: str, replicas: Iterable[str]) -> list[str]:
    """Replicas in the order in which a key prefers them.

    Highest random weight (Thaler and Ravishankar 1998), a form of consistent hashing: a replica that leaves
    loses its own keys alone, each to the next in that key's order, and one that joins takes only those
    that it comes first for.
    """
    return sorted(replicas, key=lambda name: blake2b(f"{key}\0{name}".encode()).digest(), reverse=True)


def crowded(loads: Mapping[str, int], enough: float, factor: float = 1.25) -> set[str]:
    """Replicas that should get no further request while others have room.

    These have at least ``enough`` requests in progress, and ``factor`` times the mean (the bound of
    consistent hashing with bounded loads, Mirrokni et al. 2018).

    Args:
        loads: replica -> its requests in progress.
    """
    mean = sum(loads.values()) / max(1, len(loads))
    return {name for name, load in loads.items() if load >= max(enough, factor * mean)}


def ranks(key: str, groups: Sequence[Sequence[str]], loads: Mapping[str, int], enough: float) -> list[str]:
    """Replicas in the order in which a request should try them.

    Args:
        key: the request's beginning.
        groups: replicas, best group first: those that have the request's model, then others.
        loads: replica -> its requests in progress, as far as known.
        enough: requests in progress up to which a replica is not crowded.
    """
    full = crowded(loads, enough)
    order = [name for group in groups for name in preferred(key, group)]
    return [name for name in order if name not in full] + [name for name in order if name in full]

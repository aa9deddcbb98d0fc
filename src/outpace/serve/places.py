"""Places in a body as its client wrote them: pydantic's have the names of types beside those of fields."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from outpace.serve.known import refusal_of

Place = tuple[int | str, ...]
_OBJECTS = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
_EXPECTED = "Input should be "


def written_path(body: Any, place: Seq[int | str], absent: bool = False) -> Place:
    """A place without the names of types.

    A name may be both a type's and a field's, as "text"; of two readings the one counts that has the last
    step, and then the longer one.

    Args:
        absent: the last step is a field that is not there.
    """
    if absent:
        *above, last = place
        readings = [path for path, holder in _readings(body, above) if isinstance(holder, dict)]
        return (*max(readings, key=len, default=()), last)
    paths = [path for path, _ in _readings(body, place)]
    return max(paths, key=lambda path: (path[-1:] == (place[-1],), len(path)))


def _readings(value: Any, place: Seq[int | str]) -> list[tuple[Place, Any]]:
    """All paths that the steps of a place may be, with what is there."""
    found: list[tuple[Place, Any]] = [((), value)]
    for step in place:
        found += [((*path, step), held[step]) for path, held in found if _has(held, step)]
    return found


def _has(value: Any, step: int | str) -> bool:
    if isinstance(value, dict):
        return step in value
    return isinstance(value, list) and isinstance(step, int) and step < len(value)


def told(errors: Seq[Any], first: Any, body: Any) -> tuple[Place, str]:
    """The place of an error, and what it says.

    Where one of several types was expected, each has its errors: the deepest one counts, as the client meant
    this type, and of equally deep ones all.
    """
    path, said = _told(first, body)
    fork = _fork(first["loc"][1:], path)
    if fork is None:
        return path, said
    prefix = first["loc"][: fork + 1]
    others = [_told(one, body) for one in errors if one["loc"][: fork + 1] == prefix]
    deepest = max((other for other, _ in others), key=len)
    if len(deepest) > len(path):
        path = deepest
    sayings = dict.fromkeys(said for other, said in others if other == path)
    first_said, *more = sayings
    return path, " or ".join([first_said, *(one.removeprefix(_EXPECTED) for one in more)])


def _fork(place: Seq[int | str], path: Place) -> int | None:
    """The number of steps before the first name of a type; None if there is no such name."""
    same = [one == other for one, other in zip(place, path, strict=False)]
    before = same.index(False) if False in same else len(same)
    return before if before < len(place) else None


def _told(error: Any, body: Any) -> tuple[Place, str]:
    """The place of an error, and what it says, in the client's words."""
    kind, place, said = error["type"], error["loc"][1:], str(error["msg"])
    if kind == "missing":
        return written_path(body, place, absent=True), said
    path = written_path(body, place)
    if kind == "extra_forbidden":
        return path, refusal_of(".".join(map(str, path)))
    if kind in _OBJECTS or (kind.startswith("union_tag") and not isinstance(_at(body, path), dict)):
        return path, f"{_EXPECTED}an object"
    if kind == "union_tag_not_found":
        return (*path, "type"), "Field required"
    if kind == "union_tag_invalid":
        return (*path, "type"), f"{_EXPECTED}{error['ctx']['expected_tags']}"
    return path, said


def _at(body: Any, path: Place) -> Any:
    for step in path:
        body = body[step]
    return body

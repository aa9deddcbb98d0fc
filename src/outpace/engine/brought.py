"""What a checkpoint brings to draft with: prediction layers in it, or a drafter in or beside its folder.

Only names and headers are read to find it; what is found first is loaded, to see that it fits. Nothing is
fetched: of a name on the hub, the folders in the cache are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from outpace import hub
from outpace.core import first_line
from outpace.drafters import DRAFTERS, Drafter
from outpace.drafters.mtp.mtp_checkpoint import has_layers
from outpace.engine.parts import check_shape
from outpace.learned.formats import format_of
from outpace.learned.published import config_of
from outpace.targets.base import TargetModel
from outpace.verify import Verifier

_ASSISTANT = "-assistant"  # behind its target's name, in the names of published ones


class Brought(NamedTuple):
    """A drafter that a checkpoint brings.

    Attributes:
        what: it is, in a few words.
        spec: its spec string.
        drafter: itself, loaded.
    """

    what: str
    spec: str
    drafter: Drafter[Any]


def brought(target: TargetModel, verifier: Verifier) -> tuple[Brought | None, str]:
    """The first drafter of a target's folder that fits it, or None; and why those before it do not."""
    refused: list[str] = []
    candidates = _candidates(target)
    while True:
        try:  # a default must not fail because of files that nobody named, whatever is wrong with them
            if (found := next(candidates, None)) is None:
                return None, "; ".join(refused)
            check_shape(found.drafter, verifier, target)
            return found._replace(drafter=_loaded(found.drafter, target)), "; ".join(refused)
        except Exception as error:
            refused.append(first_line(error))


def _candidates(target: TargetModel) -> Iterator[Brought]:
    """Drafters in a target's folder, those in the checkpoint first; they are not loaded."""
    if target.model is None or target.tells or target.has_encoder:
        return
    name = target.name
    here = Path(name).is_dir()
    folder = Path(name).resolve() if here else hub.here(name)
    if folder is None or not folder.is_dir():
        return
    if has_layers(target.model, folder):
        yield Brought("prediction layers in its checkpoint", "mtp", DRAFTERS["mtp"]())
    other = folder.with_name(folder.name + _ASSISTANT) if here else hub.here(name + _ASSISTANT)
    if other is not None and _method_of(other) == "assistant":
        yield _at(other, "assistant", "beside")
    for place in sorted(folder.iterdir()):
        if (method := _method_of(place)) is not None:
            yield _at(place, method, "in")


def _method_of(place: Path) -> str | None:
    """The drafter that reads a folder, by its config.json; None for anything else."""
    config = config_of(place)
    known = format_of(config)
    method = config.get("method") if known is None or "method" in config else known.drafter
    cls = DRAFTERS.get(str(method))
    return str(method) if cls is not None and "path" in {own.name for own in fields(cls)} else None


def _at(place: Path, method: str, where: str) -> Brought:
    """The drafter in a folder."""
    made: Any = DRAFTERS[method]
    return Brought(f"{place.name}, {where} its folder", f"{method}:path={place}", made(path=str(place)))


def _loaded(drafter: Drafter[Any], target: TargetModel) -> Drafter[Any]:
    """A drafter that holds what it has loaded, so that no engine loads it again."""
    given: Any = drafter
    shared = given.prepare(target)
    return replace(given, path=shared.heads if hasattr(shared, "heads") else shared.module)

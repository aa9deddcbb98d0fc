"""The drafter where none is named, and why it is this one.

What a target's own folder brings to draft with was trained for it, so it comes first, beside copying. Only
names and headers are read to find it, and nothing is fetched; what is found first is loaded, to see that it
fits.
Otherwise ``suffix``, which fits every target. On a CPU the target's rounded self joins it where a trial says
that it pays: the trial needs a few forwards, and rounds one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from outpace import hub
from outpace.core import DEFAULT_DRAFTER, UnsupportedModel, first_line
from outpace.drafters import DRAFTERS, Drafter, load_drafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.mtp.mtp_checkpoint import has_layers
from outpace.engine.parts import check_shape
from outpace.engine.slow import tell
from outpace.learned.formats import format_of
from outpace.learned.published import config_of
from outpace.targets.base import TargetModel
from outpace.verify import Verifier, load_verifier

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


_TOKENS, _RATE = 4, 0.9  # tokens of the chain that a trial counts on, and the rate at which each is right
_PAYS = 1.2  # times plain decoding's speed from which rounded weights are made


class Chosen(NamedTuple):
    """A drafter.

    Attributes:
        spec: its spec string.
        because: the reason for it.
        drafter: itself; what it has loaded, engines share.
    """

    spec: str
    because: str
    drafter: Drafter[Any]

    @classmethod
    def of(cls, spec: str, because: str) -> Chosen:
        return cls(spec, because, load_drafter(spec))


def usual(target: TargetModel, verifier: Verifier | str = "match", changes: bool = False) -> Chosen:
    """The drafter where none is named; one of chains if the target or the verifier takes only those.

    A drafter in the folder that cannot be used is reported, once in a process.

    Args:
        changes: the target's weights change between texts, or it has one text only.

    Raises:
        OutpaceError: an unknown verifier.
    """
    verifier = load_verifier(verifier)
    chains = bool(target.why_chains_only or verifier.chains)
    copying = f"{DEFAULT_DRAFTER},branches=1" if chains else DEFAULT_DRAFTER
    alone = ""
    if chains or not verifier.coupled:
        who = "the target" if target.why_chains_only else f"verifier={verifier.name!r}"
        alone = f"{who} takes no draft of several drafters"
    found, refused = (None, "") if changes else brought(target, verifier)
    if found is not None:
        return _beside(found, copying, alone)
    if refused:
        tell(f"the model's folder brings a drafter that is not used: {refused}")
    chosen = _copying(target, copying, alone, changes)
    return chosen._replace(because=f"{chosen.because}; {refused}") if refused else chosen


def _beside(found: Brought, copying: str, alone: str) -> Chosen:
    """What a folder brings, beside copying, or alone for the reason that is given."""
    if alone:
        return Chosen(found.spec, f"{found.what}; alone, since {alone}", found.drafter)
    both = Combined((load_drafter(copying), found.drafter))
    return Chosen(f"combined:({copying})+({found.spec})", found.what, both)


def _copying(target: TargetModel, copying: str, alone: str, changes: bool) -> Chosen:
    """Copying, and the target's rounded self where that pays."""
    if alone:
        return Chosen.of(copying, alone)
    if changes:
        return Chosen.of(copying, "not self, since weights change, and would be rounded anew each time")
    if not target.plan.native:
        return Chosen.of(copying, "not self, which is for native steps on a CPU")
    try:
        verified, drafted = target.rounded_costs()
    except UnsupportedModel as error:
        return Chosen.of(copying, f"not self: {error}")
    tokens = sum(_RATE**place for place in range(_TOKENS + 1))
    speed = tokens / (verified + _TOKENS * drafted)
    told = f"a row with rounded weights takes {drafted:.2f} of a step"
    if speed < _PAYS:
        return Chosen.of(copying, f"not self: {told}, which gains too little")
    return Chosen.of(f"either:({copying})+(self)", told)


def usual_drafter(
    target: TargetModel, verifier: Verifier | str = "match", changes: bool = False
) -> Drafter[Any]:
    return usual(target, verifier, changes).drafter

"""The profile that ``outpace tune`` writes: which drafter is fastest for a model on a machine.

A TOML file holds profiles of any number of models, dtypes and machines, and is read for one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.targets.base import TargetModel

FORMAT, VERSION = "outpace-profile", 1
_HEAD = "Written by `outpace tune`, read by --profile and outpace.accelerate(model, profile=...)."


@dataclass(frozen=True)
class Profile:
    """What was found for one model, dtype and machine.

    Attributes:
        drafter: the spec of the fastest drafter.
        objective: what it is the fastest by: ``throughput`` or ``latency``.
        batch: prompts decoded at once.
        tokens_per_second: as measured, by that objective.
        speedup: over plain decoding of the same prompts.
        mean_accepted_length: tokens out per step.
        prompts: how many it was measured on.
        suite: which prompts.
        outpace: the version that measured.
        step_seconds: seconds of a step over so many prompts and rows of each, as [prompts, rows, seconds].
    """

    drafter: str
    objective: str
    batch: int
    tokens_per_second: float
    speedup: float
    mean_accepted_length: float
    prompts: int
    suite: str
    outpace: str
    step_seconds: list[list[float]] = field(default_factory=list)


def key_of(target: TargetModel) -> str:
    """What a profile holds for: the model's name without folders, its size, its dtype and the machine."""
    return ", ".join([Path(target.name).name, target.identity])


def save_profile(path: str | Path, target: TargetModel, profile: Profile) -> None:
    """Write a profile to a TOML file, beside those of other models and machines that are there already.

    Raises:
        OutpaceError: the path holds something else, or cannot be written.
    """
    import tomlkit  # here, since most runs have no profile

    path = Path(path)
    known = read_profiles(path) if path.exists() else {}
    document = tomlkit.document()
    document.add(tomlkit.comment(_HEAD))
    document.update({"format": FORMAT, "version": VERSION})
    document["profiles"] = {**known, key_of(target): asdict(profile)}
    # Written beside and moved, so that a reader never meets half a file.
    draft = draft_of(path)
    try:
        draft.write_text(tomlkit.dumps(document), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise OutpaceError(f"cannot write {path}: {error.strerror or error}") from None


def draft_of(path: Path) -> Path:
    """Where a profile is written first."""
    return path.with_name(path.name + ".part")


def load_profile(path: str | Path, target: TargetModel) -> Profile:
    """The profile of a target's model, dtype and machine.

    Raises:
        OutpaceError: no such file, a broken or foreign one, or one without a profile of this target.
    """
    path = Path(path)
    known = read_profiles(path)
    key = key_of(target)
    if key not in known:
        raise OutpaceError(
            f"{path} has no profile of {key!r}, but of: {', '.join(map(repr, known)) or 'nothing'}; a "
            "profile holds for one model, dtype, and processor or GPU by its name, so run `outpace tune` here"
        )
    return _profile(path, known[key])


def other_batch(profile: Profile, at_once: Iterable[int]) -> str | None:
    """What to tell who decodes other numbers of prompts at once than the profile names; None for nothing."""
    others = sorted({count for count in at_once if count != profile.batch})
    if not others:
        return None
    numbers = ", ".join(map(str, others))
    return (
        f"the profile names what is fastest with {profile.batch} at once; with {numbers} another drafter may "
        f"be: outpace tune --batch {others[0]}"
    )


def read_profiles(path: Path) -> dict[str, dict[str, Any]]:
    """All profiles of a file, by what they hold for.

    Raises:
        OutpaceError: there is no such file, or it is none of profiles.
    """
    import tomlkit
    from tomlkit.exceptions import ParseError

    try:
        found = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    except FileNotFoundError:
        raise OutpaceError(f"there is no profile at {path}; `outpace tune --out {path}` writes one") from None
    except (OSError, ValueError, ParseError) as error:
        raise OutpaceError(f"{path} is no profile, or a broken one ({error}); run `outpace tune`") from None
    if found.get("format") != FORMAT:
        raise OutpaceError(f"{path} is a TOML file of something else; give the one that `outpace tune` wrote")
    if found.get("version") != VERSION:
        raise OutpaceError(
            f"{path} has version {found.get('version')!r} of profiles, not {VERSION}; tune anew"
        )
    profiles = found.get("profiles")
    if not isinstance(profiles, dict) or not all(isinstance(one, dict) for one in profiles.values()):
        raise OutpaceError(f"{path} is a broken profile: it has no table of them; delete it and tune anew")
    return profiles


def _profile(path: Path, entry: Mapping[str, Any]) -> Profile:
    """A profile from its table; a drafter that there is not is refused before anything decodes."""
    names = {one.name for one in fields(Profile)}
    try:
        profile = Profile(**{name: value for name, value in entry.items() if name in names})
    except TypeError as error:
        raise OutpaceError(f"{path} is a broken profile ({error}); delete it and tune anew") from None
    if not isinstance(profile.drafter, str):
        raise OutpaceError(f"{path} is a broken profile: drafter is {profile.drafter!r}; tune anew")
    try:
        load_drafter(profile.drafter)
    except OutpaceError as error:
        raise OutpaceError(f"{path}: {error}") from None
    return profile

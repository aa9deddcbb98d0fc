"""Profiles: the fastest drafter of a model on a machine, and what its steps cost.

``outpace tune`` writes both, ``Engine.save_costs`` the costs alone. A TOML file holds profiles of any number
of models, dtypes and machines, and is read for one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.files import replace_text
from outpace.targets.base import TargetModel

FORMAT, VERSION = "outpace-profile", 2
_HEAD = (
    "Written by `outpace tune` and Engine.save_costs, read by --profile and outpace.accelerate(profile=...)."
)


@dataclass(frozen=True)
class Profile:
    """The best drafter found for one model, dtype and machine.

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
        costs: measured seconds, as ``Governor.costs`` gives them, for a governor to begin with.
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
    costs: dict[str, Any] = field(default_factory=dict)


def key_of(target: TargetModel) -> str:
    """Key of a profile: the model's name without folders, its size, its dtype and the machine."""
    return ", ".join([Path(target.name).name, target.identity])


def save_profile(path: str | Path, target: TargetModel, profile: Profile) -> None:
    """Write a profile to a TOML file, beside those of other models and machines that it holds already.

    Raises:
        OutpaceError: the path holds something else, or cannot be written.
    """
    _save(Path(path), target, asdict(profile))


def save_costs(path: str | Path, target: TargetModel, costs: Mapping[str, Any]) -> None:
    """Write measured costs, as ``Governor.costs`` gives them, into a target's profile.

    Raises:
        OutpaceError: the path holds something else, or cannot be written.
    """
    _save(Path(path), target, {"costs": costs})


def _save(path: Path, target: TargetModel, entry: Mapping[str, Any]) -> None:
    """Write fields of a target's profile; its others, and costs of other drafters, are kept."""
    import tomlkit  # here, since most runs have no profile

    known = read_profiles(path) if path.exists() else {}
    old = known.get(key_of(target), {})
    costs = {**old.get("costs", {}), **entry["costs"]}
    document = tomlkit.document()
    document.add(tomlkit.comment(_HEAD))
    document.update({"format": FORMAT, "version": VERSION})
    document["profiles"] = {**known, key_of(target): {**old, **entry, "costs": costs}}
    replace_text(path, tomlkit.dumps(document))


def load_costs(path: str | Path, target: TargetModel) -> dict[str, Any]:
    """The measured costs of a target's model, dtype and machine.

    Raises:
        OutpaceError: no such file, a broken or foreign one, or one without costs of this target.
    """
    known = read_profiles(Path(path))
    costs = known.get(key_of(target), {}).get("costs")
    if not isinstance(costs, dict) or not costs:
        raise OutpaceError(
            f"{path} has no costs of {key_of(target)!r}, but profiles of: "
            f"{', '.join(map(repr, known)) or 'nothing'}; costs hold for one model, dtype, and processor or "
            "GPU by its name; measure here, without a file, or run `outpace tune`"
        )
    return costs


def load_profile(path: str | Path, target: TargetModel) -> Profile:
    """The profile of a target's model, dtype and machine.

    Raises:
        OutpaceError: no such file, a broken or foreign one, or one without a profile of this target.
    """
    path = Path(path)
    known = read_profiles(path)
    key = key_of(target)
    if "drafter" not in known.get(key, {"drafter": ""}):
        raise OutpaceError(
            f"{path} has costs of {key!r}, but no drafter; `outpace tune --out {path}` adds it"
        )
    if key not in known:
        raise OutpaceError(
            f"{path} has no profile of {key!r}, but of: {', '.join(map(repr, known)) or 'nothing'}; a "
            "profile holds for one model, dtype, and processor or GPU by its name, so run `outpace tune` here"
        )
    return _profile(path, known[key])


def other_batch(profile: Profile, at_once: Iterable[int]) -> str | None:
    """A remark, if other numbers of prompts are decoded at once than the profile names; otherwise None."""
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

"""Profiles: the fastest drafter for a model on a machine, and its measured costs.

``outpace tune`` writes both, ``Engine.save_costs`` only the costs. A TOML file contains profiles of any
number of models, dtypes and machines; a reader selects one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.files import check_plain, replace_text, sealed
from outpace.targets.base import TargetModel

FORMAT, VERSION = "outpace-profile", 2
_MOST_BYTES = 1 << 18  # of a file: tomlkit takes seconds for a megabyte
_HEAD = (
    "Written by `outpace tune` and Engine.save_costs, read by --profile and outpace.accelerate(profile=...)."
)


@dataclass(frozen=True)
class Profile:
    """The best drafter found for one model, dtype and machine.

    Attributes:
        drafter: the spec of the fastest drafter.
        objective: the measure of speed: ``throughput`` or ``latency``.
        batch: number of prompts decoded at once.
        tokens_per_second: measured speed by that objective.
        speedup: speed relative to plain decoding of the same prompts.
        mean_accepted_length: tokens emitted per step.
        prompts: number of prompts measured.
        suite: the suite of the prompts.
        outpace: the version that measured.
        costs: measured seconds in the format of ``Governor.costs``, a governor's initial costs.
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
    """Write a profile to a TOML file, and keep those of other models and machines in it.

    Raises:
        OutpaceError: the path holds something else, or cannot be written.
    """
    _save(Path(path), target, asdict(profile))


def save_costs(path: str | Path, target: TargetModel, costs: Mapping[str, Any]) -> None:
    """Write measured costs, in the format of ``Governor.costs``, into a target's profile.

    Raises:
        OutpaceError: the path holds something else, or cannot be written.
    """
    _save(Path(path), target, {"costs": costs})


def _save(path: Path, target: TargetModel, entry: Mapping[str, Any]) -> None:
    """Write fields of a target's profile; keep its other fields, and costs of other drafters."""
    import tomlkit  # imported here, since most runs need no profile

    known = read_profiles(path) if path.exists() else {}
    old = known.get(key_of(target), {})
    costs = {**old.get("costs", {}), **entry["costs"]}
    document = tomlkit.document()
    document.add(tomlkit.comment(_HEAD))
    document.update({"format": FORMAT, "version": VERSION})
    profiles = {**known, key_of(target): {**old, **entry, "costs": costs}}
    document["digest"] = sealed(tomlkit.parse(tomlkit.dumps(profiles)).unwrap())["digest"]
    document["profiles"] = profiles
    replace_text(path, tomlkit.dumps(document))


def load_costs(path: str | Path, target: TargetModel) -> dict[str, Any]:
    """Load the measured costs of a target's model, dtype and machine.

    Raises:
        OutpaceError: the file does not exist, is not a valid profile, or has no costs of this target.
    """
    known = read_profiles(Path(path))
    costs = known.get(key_of(target), {}).get("costs")
    if not isinstance(costs, dict) or not costs:
        raise OutpaceError(
            f"{path} has no costs of {key_of(target)!r}, but profiles of: "
            f"{', '.join(map(repr, known)) or 'nothing'}; costs hold for one model, dtype, and processor or "
            "GPU by its name; leave the file out to measure here, or run `outpace tune`"
        )
    return costs


def load_profile(path: str | Path, target: TargetModel) -> Profile:
    """Load the profile of a target's model, dtype and machine.

    Raises:
        OutpaceError: the file does not exist, is not a valid profile, or has no profile of this target.
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
    """A remark if the numbers of prompts decoded at once differ from the profile's; otherwise None."""
    others = sorted({count for count in at_once if count != profile.batch})
    if not others:
        return None
    numbers = ", ".join(map(str, others))
    return (
        f"the profile's drafter is fastest with {profile.batch} at once; with {numbers} another drafter may "
        f"be: outpace tune --batch {others[0]}"
    )


def read_profiles(path: Path) -> dict[str, dict[str, Any]]:
    """Load all profiles of a file, by their keys.

    Raises:
        OutpaceError: there is no such file, or it is not a file of profiles.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    check_plain(path)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise OutpaceError(f"it is larger than {_MOST_BYTES} bytes")
        found = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    except FileNotFoundError:
        raise OutpaceError(f"there is no profile at {path}; `outpace tune --out {path}` writes one") from None
    except (OSError, ValueError, TOMLKitError, RecursionError) as error:
        raise OutpaceError(f"{path} is not a valid profile ({error}); run `outpace tune`") from None
    if found.get("format") != FORMAT:
        raise OutpaceError(f"{path} is a TOML file without profiles; give one that `outpace tune` wrote")
    if found.get("version") != VERSION:
        raise OutpaceError(
            f"{path} has version {found.get('version')!r} of profiles, not {VERSION}; tune again"
        )
    profiles = found.get("profiles")
    if not isinstance(profiles, dict) or not all(isinstance(one, dict) for one in profiles.values()):
        raise OutpaceError(f"{path} is a broken profile: it has no table of profiles; tune again")
    # None in files of earlier versions, and in those that a user has written.
    if "digest" in found and sealed(profiles)["digest"] != found["digest"]:
        raise OutpaceError(
            f"{path} is not what was written: tune again; or, if you have changed it yourself, delete its "
            "line with the digest"
        )
    return profiles


def _profile(path: Path, entry: Mapping[str, Any]) -> Profile:
    """Build a profile from its table, and refuse an unknown drafter before anything decodes."""
    names = {one.name for one in fields(Profile)}
    try:
        profile = Profile(**{name: value for name, value in entry.items() if name in names})
    except TypeError as error:
        raise OutpaceError(f"{path} is a broken profile ({error}); delete it and tune again") from None
    if not isinstance(profile.drafter, str):
        raise OutpaceError(f"{path} is a broken profile: drafter is {profile.drafter!r}; tune again")
    try:
        load_drafter(profile.drafter)
    except OutpaceError as error:
        raise OutpaceError(f"{path}: {error}") from None
    return profile

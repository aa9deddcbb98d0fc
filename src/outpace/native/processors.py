"""The number of threads of steps on a CPU, and why; ``OUTPACE_THREADS`` names another.

By default one for each core that this process may use, of the fast kind where there are two; two threads of a
core share what a step is limited by.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from outpace.core import OutpaceError
from outpace.native import systems

VARIABLE = "OUTPACE_THREADS"
AUTO = "auto"
MOST = 256  # as in pool.c
_SLOW = 0.6  # of the capacity of the fastest cores


class Threads(NamedTuple):
    """A number of threads.

    Attributes:
        because: what it is the number of.
        forced: it was asked for.
    """

    number: int
    because: str
    forced: bool = False


def usual_threads(root: Path = Path("/")) -> Threads:
    """The number of threads of steps, unless torch is told another.

    Args:
        root: the folder of the system's files.

    Raises:
        OutpaceError: the variable is not a number of threads.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    if asked not in ("", AUTO):
        return Threads(checked(asked), VARIABLE, forced=True)
    if number := systems.cores():
        return Threads(min(number, MOST), "cores, of the fast kind where there are two")
    allowed = _allowed()
    cores = _cores(root, allowed)
    fast = _fast(root, cores)
    found = Threads(len(allowed), "processors that this process may use")
    if len(cores) < len(allowed):
        found = Threads(len(cores), "cores that this process may use")
    if len(fast) < len(cores):
        found = Threads(len(fast), "fast cores that this process may use")
    quota = _quota(root)
    if quota is not None and quota < found.number:
        found = Threads(max(int(quota), 1), f"its control group allows {quota:g} processors")
    return found if found.number <= MOST else Threads(MOST, "the most that there can be")


def checked(asked: str) -> int:
    """A number of threads as it was written.

    Raises:
        OutpaceError: it is not a number of threads.
    """
    if asked.isascii() and asked.isdigit() and 1 <= int(asked) <= MOST:
        return int(asked)
    raise OutpaceError(f"{VARIABLE} must be {AUTO}, or a number of threads from 1 to {MOST}, not {asked!r}")


def _allowed() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cores(root: Path, allowed: Collection[int]) -> list[int]:
    """One processor of each core."""
    folder = root / "sys/devices/system/cpu"
    found: dict[str, int] = {}
    for processor in allowed:
        siblings = _text(folder / f"cpu{processor}/topology/thread_siblings_list")
        found.setdefault(siblings or str(processor), processor)
    return list(found.values())


def _fast(root: Path, cores: Collection[int]) -> Collection[int]:
    """The cores of the fast kind; all, if the system knows no kinds."""
    named = _listed(_text(root / "sys/devices/cpu_core/cpus"))  # Intel's, where there is another kind
    if fast := [core for core in cores if core in named]:
        return fast
    folder = root / "sys/devices/system/cpu"
    capacity = {core: _text(folder / f"cpu{core}/cpu_capacity") for core in cores}
    if not all(text.isdigit() for text in capacity.values()):
        return cores
    most = max(map(int, capacity.values()))
    return [core for core, text in capacity.items() if int(text) >= _SLOW * most]


def _quota(root: Path) -> float | None:
    """Processors' worth of time that the control groups of this process have; None without a limit."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, read = root / "sys/fs/cgroup", _limit
        elif "cpu" in controllers.split(","):
            top, read = root / "sys/fs/cgroup" / controllers, _limit_of_old
        else:
            continue
        group = top / path.strip("/")
        # In a container the path may be that outside, and its group is the top.
        groups = [group, *group.parents] if group.is_dir() else [top]
        found += [read(one) for one in groups if one.is_relative_to(top)]
    return min((limit for limit in found if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    return _share(*(_text(group / "cpu.max").split() or ["", ""]))


def _limit_of_old(group: Path) -> float | None:
    return _share(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _share(quota: str, period: str) -> float | None:
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _listed(text: str) -> set[int]:
    """The numbers of a list as Linux writes it: 0-3,8."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except OSError:
        return ""

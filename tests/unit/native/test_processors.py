"""The number of threads of steps: cores, kinds of cores, control groups, ``OUTPACE_THREADS``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from outpace.core import OutpaceError
from outpace.native.processors import MOST, VARIABLE, usual_threads

Count = Callable[[Mapping[str, str]], tuple[int, str]]
FOLDER = "sys/devices/system/cpu"
PAIRS = {f"{FOLDER}/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}\n" for n in range(8)}
HYBRID = {f"{FOLDER}/cpu{n}/topology/thread_siblings_list": ("0-1", "0-1", "2-3", "2-3")[n] for n in range(4)}
HYBRID |= {f"{FOLDER}/cpu{n}/topology/thread_siblings_list": str(n) for n in range(4, 8)}


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Count:
    """The number, and what it is of, on a system of eight processors with these files."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def counted(files: Mapping[str, str]) -> tuple[int, str]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return usual_threads(tmp_path)[:2]

    return counted


def test_every_processor_counts_where_nothing_is_known(count: Count) -> None:
    assert count({}) == (8, "processors that this process may use")


def test_threads_of_a_core_count_once(count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(PAIRS) == (4, "cores that this process may use")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
    assert count({}) == (2, "cores that this process may use")


def test_fast_cores_count_alone(count: Count) -> None:
    assert count({**HYBRID, "sys/devices/cpu_core/cpus": "0-3\n"}) == (
        2,
        "fast cores that this process may use",
    )


def test_cores_of_high_capacity_count_alone(count: Count) -> None:
    capacity = {
        f"{FOLDER}/cpu{n}/cpu_capacity": str(1024 if n == 7 else 900 if n > 3 else 400) for n in range(8)
    }
    assert count(capacity) == (4, "fast cores that this process may use")


@pytest.mark.parametrize("slow", ["0", "3"])
def test_slow_cores_count_where_the_process_may_use_no_other(
    slow: str, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6})
    found = count({**HYBRID, "sys/devices/cpu_core/cpus": f"0-{slow}\n"})
    assert found == (3, "processors that this process may use")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("900000 100000", 8), ("", 8), ("1 0", 8)],
)
def test_a_control_group_limits_them(limit: str, expected: int, count: Count) -> None:
    group = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/cpu.max": limit,
        "sys/fs/cgroup/a/b/cpu.max": "max 1",
    }
    number, because = count(group)
    assert number == expected and ("control group" in because) == (expected < 8)


def test_the_group_of_a_container_is_the_top(count: Count) -> None:
    group = {"proc/self/cgroup": "0::/../outside\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}
    assert count(group) == (3, "its control group allows 3 processors")


def test_old_control_groups_limit_them(count: Count) -> None:
    top = "sys/fs/cgroup/cpu,cpuacct"
    files = {f"{top}/x/cpu.cfs_quota_us": "150000\n", f"{top}/x/cpu.cfs_period_us": "100000\n"}
    files |= {"proc/self/cgroup": "3:memory:/y\n4:cpu,cpuacct:/x\n", f"{top}/cpu.cfs_quota_us": "-1"}
    assert count(files) == (1, "its control group allows 1.5 processors")


def test_the_variable_is_obeyed_or_refused(count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "11")
    assert count(PAIRS) == (11, VARIABLE)
    monkeypatch.setenv(VARIABLE, "auto")
    assert count({}) == (4, "cores that this process may use")
    for wrong in ("0", "-1", "1.5", "many", str(MOST + 1)):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(OutpaceError, match=f"must be auto, or a number of threads from 1 to {MOST}"):
            count({})

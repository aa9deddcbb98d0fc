"""A version of transformers that outpace does not know: a warning, and the self-test decides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models import tiny_llama
from outpace import Target
from outpace.targets.inputs import versions
from outpace.targets.stock import causal

ROOT = Path(__file__).parents[3]


def test_a_newer_version_is_warned_of_once_and_not_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newer = f"{versions.HIGHEST[0]}.{versions.HIGHEST[1] + 1}.0.dev0"
    versions.warn_of_untested.cache_clear()
    monkeypatch.setattr(causal, "warn_of_untested", lambda: versions.warn_of_untested(newer))
    for _ in range(2):
        assert Target(tiny_llama(), check=True).plan.name
    (record,) = caplog.records
    tested = "{}.{} to {}.{}".format(*versions.LOWEST, *versions.HIGHEST)
    assert newer in record.getMessage() and f"{tested}; the self-test" in record.getMessage()


@pytest.mark.parametrize("version", ["5.10.1", "5.9.0", "{}.{}.3", "4.99.0"])
def test_other_versions_are_not_warned_of(version: str, caplog: pytest.LogCaptureFixture) -> None:
    versions.warn_of_untested.cache_clear()
    versions.warn_of_untested(version.format(*versions.HIGHEST))
    assert not caplog.records


@pytest.mark.parametrize("version", ["{}.{}.1", "6.0.0"])
def test_versions_after_the_highest_are(version: str, caplog: pytest.LogCaptureFixture) -> None:
    versions.warn_of_untested.cache_clear()
    major, minor = versions.HIGHEST
    versions.warn_of_untested(version.format(major, minor + 1))
    assert f"<{major}.{minor + 1}" in caplog.text


def test_the_range_is_what_the_tests_run_on() -> None:
    lowest = re.search(r'"transformers>=(\d+)\.(\d+)', (ROOT / "pyproject.toml").read_text("utf-8"))
    highest = re.search(r"^transformers==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert lowest and tuple(map(int, lowest.groups())) == versions.LOWEST
    assert highest and tuple(map(int, highest.groups())) == versions.HIGHEST

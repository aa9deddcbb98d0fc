"""``outpace tune`` and ``--profile`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.bench import tuning
from outpace.bench.ways import WaySpeed
from outpace.cli import app
from outpace.console.models import Loaded
from outpace.console.tune import agrees
from outpace.profile import load_profile, save_profile

tomlkit = pytest.importorskip("tomlkit")

DRAFTERS = "prompt_lookup:num_tokens=4,lookahead:window=2,ngram=3,guesses=2"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(tuning, "WIDTHS", (1, 2, 8))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"say {number}, say {number}"}) + "\n" for number in range(8))
    )
    return file


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def tuned(folder: Path, prompts: Path, out: Path, *more: Any) -> Any:
    small = ("--suite", f"file:{prompts}", "-n", 6, "--budget", 60, "--drafters", DRAFTERS)
    return run("tune", "-m", folder, "--device", "cpu", "--out", out, *small, *more)


def test_a_profile_is_written_and_every_command_reads_it(
    folder: Path, model: Loaded, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "profile.toml"
    result = tuned(folder, prompts, out, "--verify", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    profile = load_profile(out, model.target)
    assert found["profile"]["drafter"] == profile.drafter in ["none", *_specs()]
    assert found["candidates"][0]["measured"] == found["expected"]["prompts"]
    assert {one["name"] for one in found["candidates"]} == {"none", *_specs()}
    # 8 prompts, a quarter of them kept.
    assert 1 <= found["expected"]["prompts"] <= 6 and found["verified"]["prompts"] == 2
    assert found["verified"]["equal"] == found["verified"]["outputs"] == 2
    assert found["as_expected"] in (True, False)
    assert profile.step_seconds and profile.suite == f"file:{prompts}" and profile.batch == 1


def _specs() -> list[str]:
    return ["prompt_lookup:num_tokens=4", "lookahead:window=2,ngram=3,guesses=2"]


@pytest.fixture
def profile(folder: Path, prompts: Path, model: Loaded, tmp_path: Path) -> Path:
    """A profile that names a drafter of our choice."""
    from outpace.profile import Profile

    out = tmp_path / "made.toml"
    made = Profile("lookahead:window=2,ngram=3,guesses=2", "throughput", 1, 1.0, 1.0, 1.0, 1, "made", "0")
    save_profile(out, model.target, made)
    return out


def test_generate_decodes_with_the_profiles_drafter(folder: Path, model: Loaded, profile: Path) -> None:
    common = ("generate", "-m", folder, "--device", "cpu", "-p", "say it, say it", "-n", 20, "--json")
    plain = json.loads(run(*common, "--drafter", "none").stdout)
    fast = json.loads(run(*common, "--profile", profile).stdout)
    assert fast["tokens"] == plain["tokens"]
    assert fast["stats"]["drafted"] > 0 and fast["stats"]["extra"]["guessed"] > 0
    result = run(*common, "--profile", profile, "--drafter", "none")
    assert result.exit_code == 2 and "give --drafter or --profile, not both" in result.stderr


@pytest.mark.parametrize("command", [("demo", "--once", "-p", "say it"), ("chat",)])
def test_other_commands_read_it(folder: Path, profile: Path, command: tuple[str, ...]) -> None:
    common = (*command, "-m", folder, "--device", "cpu", "-n", 4)
    result = CliRunner().invoke(app, list(map(str, (*common, "--profile", profile))), input="/exit\n")
    assert result.exit_code == 0, result.output
    if command[0] == "demo":
        assert "lookahead:window=2" in result.output
    missing = run(*common, "--profile", profile.with_name("none.toml"))
    assert missing.exit_code == 2 and "there is no profile at" in " ".join(missing.stderr.split())


def test_bench_measures_the_profiles_drafter_too(folder: Path, profile: Path, prompts: Path) -> None:
    result = run(
        *("bench", "-m", folder, "--device", "cpu", "--suite", f"file:{prompts}", "--limit", 1, "-n", 4),
        *("--drafters", "none", "--peers", "none", "--profile", profile, "--json", "-"),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["drafter"] for row in rows] == ["none", "lookahead:window=2,ngram=3,guesses=2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--objective", "size"), "no objective 'size'"),
        (("--objective", "latency", "--batch", "1,4"), "give one --batch"),
        (("--batch", "some"), "--batch takes numbers"),
        (("--drafters", "magic"), "no drafter 'magic'"),
        (("--suite", "file:/nowhere.jsonl"), "no such file: /nowhere.jsonl"),
        (("--out", "/nowhere/profile.toml"), "no such folder: /nowhere"),
        (("--limit", "1", "--verify"), "--verify needs prompts that were not tuned on"),
        (("--batch", "16"), "8 prompts, and 16 are decoded at a time"),
        (("-n", "1"), "--max-new-tokens must be at least 2"),
    ],
)
def test_mistakes(
    folder: Path, prompts: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = tuned(folder, prompts, tmp_path / "profile.toml", *options)
    assert message in " ".join(result.stderr.split()), result.output
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert not (tmp_path / "profile.toml").exists()


def test_another_file_is_not_replaced(folder: Path, prompts: Path, tmp_path: Path) -> None:
    other = tmp_path / "pyproject.toml"
    other.write_text('title = "mine"\n')
    result = tuned(folder, prompts, other)
    assert result.exit_code == 2 and "a TOML file of something else" in " ".join(result.stderr.split())
    assert other.read_text() == 'title = "mine"\n'


def test_intervals_that_meet_agree() -> None:
    def speed(middle: float, interval: tuple[float, float] | None) -> WaySpeed:
        return WaySpeed(1.0, 1.0, middle, interval, 1.0, 1, 1, 1)

    assert agrees(speed(1.5, (1.4, 1.6)), speed(1.7, (1.6, 1.8)))
    assert not agrees(speed(1.5, (1.4, 1.6)), speed(1.8, (1.7, 1.9)))
    assert agrees(speed(1.5, (1.4, 1.6)), speed(1.45, None))
    assert not agrees(speed(1.5, None), speed(1.45, None))

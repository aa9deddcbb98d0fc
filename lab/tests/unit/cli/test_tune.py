"""``outpace tune`` and ``--profile`` from a user's point of view."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.bench.runs import MethodRun, PromptBatch
from outpace.cli import app
from outpace.core import OutpaceError
from outpace.engine.profile import Profile, load_profile, save_profile
from outpace.loading import Loaded
from outpace.targets import CausalTarget
from outpace_lab.bench import tuning
from outpace_lab.bench.tuning import Frugal

tomlkit = pytest.importorskip("tomlkit")

DRAFTERS = "prompt_lookup:num_speculative_tokens=4,lookahead:window=2,ngram=3,guesses=2"


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
    assert found["candidates"][0]["prompts"] == found["expected"]["prompts"]
    assert {one["name"] for one in found["candidates"]} == {"none", *_specs()}
    # 8 prompts, a quarter of them kept.
    assert 1 <= found["expected"]["prompts"] <= 6 and found["verified"]["prompts"] == 2
    assert found["verified"]["equal"] == found["verified"]["outputs"] == 2
    # Two prompts are too few for an interval.
    assert found["as_expected"] is None and found["whole"] and not found["broken"]
    assert found["differences"] == [] and found["out"] == str(out)
    for one in found["candidates"]:
        assert one["failed"] is None and 1 <= one["tau"] <= 6
        assert one["name"] != "none" or one["tau"] == 1
    assert profile.costs["verify"]["1"] and profile.suite == f"file:{prompts}" and profile.batch == 1


def words(text: str) -> str:
    """Text as one line: a table's lines may be broken anywhere."""
    return " ".join(text.split())


def test_what_a_person_reads(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.toml"
    result = tuned(folder, prompts, out, "--verify", "--eos")
    assert result.exit_code == 0, result.output
    head, *told = result.stdout.splitlines()
    assert head.startswith("3 candidates, ")
    (titles,) = (line.split("\u2503")[1:-1] for line in told if "drafter" in line and "tau" in line)
    assert [title.strip() for title in titles] == ["drafter", "prompts", "tau", "tokens/s"]
    shown = [line.split("\u2502")[1:-1] for line in told if line.startswith("\u2502")]
    cells = {name.strip(): [float(number) for number in figures] for name, *figures in shown}
    assert cells.keys() == {"none", *_specs()}
    assert cells["none"][1] == 1 and all(tau >= 1 and rate > 0 for _, tau, rate in cells.values())
    fastest, expected, verified, written = told[-4:]
    assert fastest.startswith("fastest: ") and fastest.removeprefix("fastest: ").split(",")[0] in str(cells)
    assert re.match(r"expected: [\d.]+ tokens/s, [\d.]+ times .*as fast as plain decoding$", expected)
    assert re.match(
        r"verified on 2 other prompts: .*, 2 of 2 outputs equal to plain .*; too few to compare .*", verified
    )
    assert written == f"profile: {out}" and out.is_file()
    assert "seconds: 6 of 60" in result.stderr or "seconds: " not in result.stderr


def test_a_candidate_that_fails_is_told(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Frugal.run

    def fail(self: Frugal, request: PromptBatch) -> MethodRun:
        if self.name.startswith("lookahead"):
            raise ValueError("no such kernel")
        return right(self, request)

    monkeypatch.setattr(Frugal, "run", fail)
    result = tuned(folder, prompts, tmp_path / "profile.toml")
    assert result.exit_code == 0, result.output
    failed = [line for line in result.stdout.splitlines() if line.startswith("failed: ")]
    assert failed == ["failed: lookahead:window=2,ngram=3,guesses=2: ValueError: no such kernel"]
    assert not any(line.startswith("\u2502 lookahead") for line in result.stdout.splitlines())


def unequal(monkeypatch: pytest.MonkeyPatch, model: Loaded, apart: float) -> None:
    """Every drafter's outputs differ from plain decoding's at the sixth token, at such a margin."""
    right = Frugal.run

    def wrong(self: Frugal, request: PromptBatch) -> MethodRun:
        found = right(self, request)
        if self.name != "none":
            found = replace(found, seconds=found.seconds / 1000)  # so that it is chosen
            for output in found.outputs:
                output[5] ^= 1
        return found

    monkeypatch.setattr(Frugal, "run", wrong)
    monkeypatch.setattr(tuning, "margin_of", lambda target, asked, output: apart)


@pytest.mark.parametrize(
    ("dtype", "promise", "apart", "code"),
    [
        ("float32", "same tokens but for near-ties", 0.5, 1),
        ("float32", "same tokens but for near-ties", 5e-5, 0),
        ("bfloat16", "not exact", 0.5, 0),
        ("bfloat16", "same bits", 5e-5, 1),
    ],
)
def test_outputs_that_differ_are_told_and_only_a_broken_promise_is_an_error(
    folder: Path,
    prompts: Path,
    tmp_path: Path,
    model: Loaded,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    promise: str,
    apart: float,
    code: int,
) -> None:
    monkeypatch.setattr(CausalTarget, "promise", promise)  # whatever this processor allows
    unequal(monkeypatch, model, apart)
    options = ("--verify", "--dtype", dtype)
    result = tuned(folder, prompts, tmp_path / "profile.toml", *options)
    assert result.exit_code == code, result.output
    told = [line for line in result.stdout.splitlines() if "plainly and" in line]
    assert len(told) == 2 and all(f"the two best logits there are {apart:.2g} apart" in one for one in told)
    assert "0 of 2 outputs equal" in result.stdout
    assert ("no promise is broken" in result.stdout) == (code == 0)
    if dtype == "bfloat16":
        found = json.loads(tuned(folder, prompts, tmp_path / "profile.toml", *options, "--json").stdout)
        assert found["broken"] == (code == 1)
        assert [one["index"] for one in found["differences"]] == [5, 5]


def test_ctrl_c_while_verifying_leaves_what_was_found(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace_lab.cli.tune_run.verify", lambda *given: None)
    out = tmp_path / "profile.toml"
    result = tuned(folder, prompts, out, "--verify")
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert "fastest: " in result.stdout and "not verified" in result.stdout and out.is_file()
    found = json.loads(tuned(folder, prompts, out, "--verify", "--json").stdout)
    assert not found["whole"] and found["verified"] is None and found["expected"]["speedup"] > 0


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_what_was_found_is_shown_though_it_cannot_be_written(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: tuple[str, ...]
) -> None:
    def fail(*given: Any) -> None:
        raise OutpaceError("cannot write it: no space left on device")

    monkeypatch.setattr("outpace_lab.cli.tune_run.save_profile", fail)
    result = tuned(folder, prompts, tmp_path / "profile.toml", *as_json)
    assert result.exit_code == 2 and "no space left on device" in words(result.stderr)
    if as_json:
        found = json.loads(result.stdout)
        assert found["out"] is None and not found["whole"] and found["expected"]["speedup"] > 0
    else:
        assert "fastest: " in result.stdout and "no profile was written" in result.stdout


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a folder where nobody may write")
def test_a_place_that_cannot_be_written_is_refused_first(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace_lab.cli.tune_run.tune", lambda *given: pytest.fail("it was tuned"))
    result = tuned(folder, prompts, Path("/proc/profile.toml"))
    assert result.exit_code == 2 and "cannot write /proc/profile.toml" in words(result.stderr)


@pytest.mark.parametrize(("options", "ends"), [((), False), (("--eos",), True)])
def test_answers_end_at_end_tokens_where_that_is_asked_for(
    folder: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    ends: bool,
) -> None:
    right, asked = Frugal.run, []

    def spied(self: Frugal, request: PromptBatch) -> MethodRun:
        asked.append(request.ends)
        return right(self, request)

    monkeypatch.setattr(Frugal, "run", spied)
    result = tuned(folder, prompts, tmp_path / "profile.toml", "--verify", *options)
    assert result.exit_code == 0 and set(asked) == {ends}, result.output


def _specs() -> list[str]:
    return ["prompt_lookup:num_speculative_tokens=4", "lookahead:window=2,ngram=3,guesses=2"]


@pytest.fixture
def profile(folder: Path, prompts: Path, model: Loaded, tmp_path: Path) -> Path:
    """A profile that names a drafter of our choice."""
    out = tmp_path / "made.toml"
    made = Profile("lookahead:window=2,ngram=3,guesses=2", "throughput", 1, 1.0, 1.0, 1.0, 1, "made", "0")
    save_profile(out, model.target, made)
    return out


def test_generate_decodes_with_the_profiles_drafter(folder: Path, model: Loaded, profile: Path) -> None:
    common = ("generate", "-m", folder, "--device", "cpu", "-p", "say it, say it", "-n", 20, "--json")
    plain = json.loads(run(*common, "--drafter", "none").stdout)
    fast = json.loads(run(*common, "--profile", profile, "--no-adaptive").stdout)
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
    ("batch", "command", "told"),
    [
        (1, ("generate", "-p", "a"), ""),
        (4, ("generate", "-p", "a"), "fastest with 4 at once; with 1 another drafter may be: outpace tune"),
        (1, ("generate", "-p", "a", "--batch", "2"), ""),
        (2, ("generate", "--file", "PROMPTS", "--batch", "2"), ""),
        (1, ("generate", "--file", "PROMPTS", "--batch", "2"), "with 1 at once; with 2 another"),
        (4, ("chat",), "with 4 at once; with 1 another"),
        (4, ("demo", "--once", "-p", "a"), "with 4 at once; with 1 another"),
    ],
)
def test_a_profile_for_another_number_at_once_says_so(
    folder: Path,
    prompts: Path,
    model: Loaded,
    tmp_path: Path,
    batch: int,
    command: tuple[str, ...],
    told: str,
) -> None:
    out = tmp_path / "made.toml"
    save_profile(out, model.target, Profile("suffix", "throughput", batch, 1.0, 1.0, 1.0, 1, "made", "0"))
    given = [str(prompts) if one == "PROMPTS" else one for one in command]
    common = [*given, "-m", str(folder), "--device", "cpu", "-n", "4", "--profile", str(out)]
    result = CliRunner().invoke(app, common, input="/exit\n")
    assert result.exit_code == 0, result.output
    assert (told in words(result.stderr)) if told else ("at once" not in result.stderr)


def test_bench_notes_a_profile_for_another_number_at_once(folder: Path, profile: Path, prompts: Path) -> None:
    common = ("bench", "-m", folder, "--device", "cpu", "--suite", f"file:{prompts}", "--limit", 2, "-n", 4)
    more = ("--drafters", "none", "--peers", "none", "--profile", profile, "--json", "-")
    for batch, noted in (("1", 0), ("1,2", 1)):
        result = run(*common, *more, "--batch", batch)
        assert result.exit_code == 0, result.output
        notes = json.loads(result.stdout.splitlines()[-1])["notes"]
        told = [note for note in notes if "fastest with 1 at once; with 2 another drafter may be" in note]
        assert len(told) == noted and ("fastest with 1" in words(result.stderr)) == bool(noted)


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
        (("--budget", "inf"), "--budget must be a finite number of seconds, not inf"),
        (("--budget", "nan"), "--budget"),
        (("--budget", "0"), "0.001"),
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
    assert result.exit_code == 2 and "a TOML file without profiles" in " ".join(result.stderr.split())
    assert other.read_text() == 'title = "mine"\n'

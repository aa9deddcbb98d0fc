"""Commands that install what is missing, in a clone and installed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomlkit

from outpace.core import OutpaceError, install, load_extra, remedies

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "src").rglob("*.py"), *(ROOT / "lab/src").rglob("*.py")]


def test_an_installed_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "clone", lambda: tmp_path)
    monkeypatch.setattr(remedies, "origin", lambda: None)
    assert install("serve") == 'pip install "outpace[serve]"'
    assert install("train", "outpace-lab") == 'pip install "outpace-lab[train]"'
    assert install(package="outpace-lab") == "pip install outpace-lab"


def test_what_it_was_installed_from_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str | None] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remedies, "clone", lambda: tmp_path)
    monkeypatch.setattr(remedies, "distribution", lambda _: SimpleNamespace(read_text=lambda name: noted[-1]))
    noted.append(json.dumps({"dir_info": {}, "url": ROOT.as_uri()}))
    assert install("serve") == f'pip install "{ROOT}[serve]"'
    assert install("train", "outpace-lab") == f'pip install "{ROOT / "lab"}[train]"'
    monkeypatch.chdir(ROOT)
    assert install("serve") == 'pip install ".[serve]"'
    wheel = tmp_path / "outpace 0.1.whl"
    wheel.touch()
    noted.append(json.dumps({"archive_info": {}, "url": wheel.as_uri()}))
    assert install("serve") == f'pip install "{wheel}[serve]"'
    assert install("train", "outpace-lab") == 'pip install "outpace-lab[train]"'
    wheel.unlink()
    for elsewhere in (
        noted[-1],
        json.dumps({"vcs_info": {}, "url": "https://example.org/outpace.git"}),
        None,
    ):
        noted.append(elsewhere)
        assert install("serve") == 'pip install "outpace[serve]"'


def test_in_a_clone_its_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remedies.clone() == ROOT
    monkeypatch.chdir(ROOT)
    assert install("serve") == 'pip install --editable ".[serve]"'
    assert install(package="outpace-lab") == 'pip install --editable "./lab"'
    monkeypatch.chdir(tmp_path)
    assert install("serve") == f'pip install --editable "{ROOT}[serve]"'
    assert install("train", "outpace-lab") == f'pip install --editable "{ROOT / "lab"}[train]"'


def test_a_missing_module_is_answered_with_the_command() -> None:
    with pytest.raises(OutpaceError) as caught:
        load_extra("no_such_module", "grading", "grade", "outpace-lab")
    assert str(caught.value) == f"grading needs no_such_module: {install('grade', 'outpace-lab')}"


def test_every_message_has_its_command_from_here_and_names_an_extra_that_there_is() -> None:
    extras = {
        package: tomlkit.parse((ROOT / folder / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        for package, folder in {"outpace": ".", "outpace-lab": "lab"}.items()
    }
    found = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if path.name != "remedies.py":
            assert not re.search(r"pip install\W+(--\w+ )*['\"]?outpace", text), path
        found += re.findall(r'\binstall\(["\'](\w+)["\'](?:, ["\']([\w-]+)["\'])?\)', text)
        found += re.findall(r'load_extra\("\w+", "[^"]+", "(\w+)"(?:, "([\w-]+)")?\)', text)
    assert len(found) >= 8
    for extra, package in found:
        assert extra in extras[package or "outpace"], extra

"""A release: workflows that call make's targets, one version, one address, a README for an index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import yaml

import outpace

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE))
PROJECT: dict[str, Any] = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8")).unwrap()
ADDRESS = PROJECT["project"]["urls"]["Repository"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
YAML = [
    *WORKFLOWS,
    *sorted((ROOT / ".github").glob("*.yml")),
    *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
]


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in WORKFLOWS:
        for name, job in read(file)["jobs"].items():
            yield f"{file.name} {name}", job


def not_a_target(command: str) -> str:
    """What is wrong with a command that should be make with one target; empty if nothing is."""
    found = re.fullmatch(r"make ([a-z-]+)(?: [A-Z_]+=\S+)*", command.strip())
    if found is None:
        return f"{command!r} is not make with a target"
    return "" if found[1] in TARGETS else f"there is no target {found[1]}"


def test_a_wrong_command_is_found() -> None:
    assert not not_a_target("make test PYTHON=python") and not not_a_target("make lint\n")
    assert "not make" in not_a_target("pip install .") and "not make" in not_a_target(
        "make lint && rm -r dist"
    )
    assert "no target weels" in not_a_target("make weels")


@pytest.mark.parametrize("file", YAML, ids=lambda file: file.name)
def test_files_for_other_services_are_yaml(file: Path) -> None:
    assert isinstance(read(file), dict)


def test_workflows_call_make_and_nothing_else() -> None:
    commands = [(name, step["run"]) for name, job in jobs() for step in job["steps"] if "run" in step]
    assert len(commands) >= 7
    assert [f"{name}: {why}" for name, command in commands if (why := not_a_target(command))] == []
    used = {re.sub(r"@.*", "", step["uses"]) for _, job in jobs() for step in job["steps"] if "uses" in step}
    official = {"checkout", "setup-python", "upload-artifact", "download-artifact"}
    assert used <= {*(f"actions/{name}" for name in official), "pypa/gh-action-pypi-publish"}


def test_every_python_and_system_that_the_package_names_is_tested() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    named = PROJECT["project"]["classifiers"]
    pythons = [line.removeprefix("Programming Language :: Python :: ") for line in named]
    assert matrix["python"] == [version for version in pythons if re.fullmatch(r"3\.\d+", version)]
    assert PROJECT["project"]["requires-python"] == f">={matrix['python'][0]}"
    systems = {
        "ubuntu-latest": "POSIX :: Linux",
        "macos-latest": "MacOS",
        "windows-latest": "Microsoft :: Windows",
    }
    assert [f"Operating System :: {systems[name]}" in named for name in matrix["os"]] == [True] * 3


def test_only_publishing_may_ask_for_an_identity_and_no_job_may_write() -> None:
    for file in WORKFLOWS:
        assert read(file)["permissions"] == {"contents": "read"}
    assert {name: job["permissions"] for name, job in jobs() if "permissions" in job} == {
        "release.yml publish": {"id-token": "write"}
    }


def test_hooks_run_what_make_lint_runs() -> None:
    hooks = [
        hook["entry"] for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]
    ]
    [parts] = re.findall(r"^lint: (.*)$", MAKEFILE, re.MULTILINE)
    assert hooks == [f"make {part}" for part in parts.split()]
    assert not any(map(not_a_target, hooks))


def test_the_version_is_the_same_everywhere() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert read(ROOT / "CITATION.cff")["version"] == outpace.__version__
    [first, *_] = re.findall(r"^## \[?([^\]\s]+)", changes, re.MULTILINE)
    assert first == outpace.__version__
    assert changes.count("\n") < 100
    laboratory = tomlkit.parse((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8")).unwrap()
    assert laboratory["project"]["version"] == outpace.__version__


def test_the_address_is_the_same_everywhere() -> None:
    files = [*YAML, ROOT / "pyproject.toml", ROOT / "lab" / "pyproject.toml", *ROOT.glob("*.md")]
    assert all(url.startswith(ADDRESS) for url in PROJECT["project"]["urls"].values())
    owner = ADDRESS.removeprefix("https://github.com/").removesuffix("/outpace")
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:github\.com|githubusercontent\.com)/([\w-]+)/outpace\b", text)) <= {
            owner
        }, file


def on_an_index(text: str) -> str:
    """A README as the build writes it into the package."""
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"].replace("$HFPR_VERSION", "1"), text)
    return text


def test_links_and_pictures_of_the_readme_work_on_an_index() -> None:
    raw = ADDRESS.replace("github.com", "raw.githubusercontent.com") + "/v1"
    page = f"{ADDRESS}/blob/v1"
    assert on_an_index("[a](docs/a.md#b) [c](#c) [d](https://d.example/e)") == (
        f"[a]({page}/docs/a.md#b) [c](#c) [d](https://d.example/e)"
    )
    assert on_an_index("![a](./docs/a.svg)") == f"![a]({raw}/docs/a.svg)"
    assert on_an_index('[![a](a.svg)](b.md) <img width="9" src="a.svg"> <a href="b.md">') == (
        f'[![a]({raw}/a.svg)]({page}/b.md) <img width="9" src="{raw}/a.svg"> <a href="{page}/b.md">'
    )
    found = on_an_index((ROOT / "README.md").read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|href|srcset)=\"([^\"]+)\"", found)
    assert len(links) > 10
    for link in ("".join(both) for both in links):
        assert link.startswith(("https://", "#")), link
        for base in (raw, page):
            if link.startswith(base):
                assert (ROOT / link.removeprefix(base + "/").partition("#")[0]).exists(), link


def test_the_package_says_that_it_is_typed_and_the_archive_can_be_built() -> None:
    assert (ROOT / "src" / "outpace" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]
    build = PROJECT["tool"]["hatch"]["build"]["targets"]
    hook = build["wheel"]["hooks"]["custom"]["path"]
    assert (ROOT / hook).is_file() and f"/{hook}" in build["sdist"]["include"]


def test_the_container_is_built_from_a_wheel() -> None:
    text = (ROOT / "docs" / "Containerfile").read_text(encoding="utf-8")
    [copied] = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
    for name in copied.split():
        assert name.startswith("dist/") or (ROOT / name).is_file()
    assert "dist/outpace-*linux*.whl" in copied and "make wheels" in text
    assert '"outpace", "serve"' in text

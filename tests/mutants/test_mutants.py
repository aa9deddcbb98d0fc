"""The tests can fail: each deliberate bug of ``mutants`` is seen by the quick tests that guard its place.

A mutant is a text of the source and a wrong one in its place. A process of its own runs the tests that must
fail with it; ``hook/sitecustomize.py`` compiles the wrong text there, and the source on disk stays as it is.
"""

from __future__ import annotations

import builtins
import dis
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType

import pytest

from mutants.mutants import MUTANTS, Mutant
from mutants.nursery import HOOK

ROOT = Path(__file__).parents[2]
PACKAGES = {"outpace": ROOT / "src", "outpace_lab": ROOT / "lab" / "src"}
_FOLDER_OF_C = "outpace/native/packaged.py", "FOLDER = Path(__file__).parent  # of the sources"
_SELF_TEST = "outpace/targets/step/self_test.py", "    try:\n        self_test(target, stock)\n"

# Runs pytest: takes its arguments, the environment and the file of its output, and returns its status.
Run = Callable[[list[str], dict[str, str], Path], int]


def path_of(file: str) -> Path:
    return PACKAGES[file.partition("/")[0]] / file


def changed(file: str, old: str, new: str) -> str:
    """A file's text with another in place of one that occurs in it once."""
    text = path_of(file).read_text("utf-8")
    assert text.count(old) == 1, f"{file} does not contain once: {old}"
    return text.replace(old, new)


def names_read(code: CodeType) -> set[str]:
    """The names of globals that code reads, its functions too."""
    inner = [names_read(part) for part in code.co_consts if isinstance(part, CodeType)]
    return {str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}.union(
        *inner
    )


def mutated(mutant: Mutant, folder: Path) -> dict[str, str]:
    """Environment variables for processes that run a mutant, whose texts are written below a folder.

    A file in C is wrong in a copy of its folder, of which ``native/packaged.py`` is told; what is compiled is
    not kept in the user's cache.
    """
    texts = {mutant.file: changed(mutant.file, mutant.old, mutant.new)}
    variables = {}
    source = path_of(mutant.file)
    if source.suffix in (".c", ".h"):
        copies = folder / "native"
        copies.mkdir()
        for file in source.parent.glob("*.[ch]"):
            (copies / file.name).write_bytes(file.read_bytes())
        (copies / source.name).write_text(texts.pop(mutant.file), "utf-8")
        folders, place = _FOLDER_OF_C
        texts[folders] = changed(folders, place, f"FOLDER = Path({str(copies)!r})")
        variables["OUTPACE_CACHE"] = str(folder / "cache")
    if mutant.untested:
        file, begin = _SELF_TEST
        texts[file] = changed(file, begin, f"    return\n{begin}")
    paths = {}
    for number, (file, text) in enumerate(texts.items()):
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        paths[module] = str(folder / f"{number}.py")
        Path(paths[module]).write_text(text, "utf-8")
    return variables | {"MUTANT_TEXTS": json.dumps(paths)}


def command(mutant: Mutant, tests: str) -> list[str]:
    """Arguments of pytest."""
    marks = ["-m", "slow"] if mutant.reason else []  # no quick test sees it
    # pytest imports files with names of tests itself, and *_test.py are some of the source.
    files = ["-o", "python_files=test_*.py"]
    fast = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    return [*fast, *files, *marks, *shlex.split(tests)]


def seen(status: int, output: str) -> bool:
    """True if a test failed. An error before, as of a text that cannot be imported, says nothing about it."""
    return status == 1 and bool(re.search(r"^\d+ failed", output, re.MULTILINE))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """pytest in a fork of a process that has imported what takes seconds."""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [*map(str, PACKAGES.values()), *filter(None, [os.environ.get("PYTHONPATH")])]
    nursery = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("nursery.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=kept | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert nursery.stdin is not None and nursery.stdout is not None
    wanted, statuses = nursery.stdin, nursery.stdout

    def in_fork(arguments: list[str], variables: dict[str, str], output: Path) -> int:
        environment = kept | {"PYTHONPATH": os.pathsep.join([str(HOOK), *paths])} | variables
        job = {"arguments": arguments, "environment": environment, "output": str(output)}
        wanted.write(json.dumps(job) + "\n")
        wanted.flush()
        return int(statuses.readline())

    with nursery:
        yield in_fork
        wanted.close()


def test_the_list_fits_the_source() -> None:
    assert not [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1]
    assert not [m.name for m in MUTANTS if m.old == m.new or not m.killed_by]
    stale = [m.name for m in MUTANTS if path_of(m.file).read_text("utf-8").count(m.old) != 1]
    assert not stale, "the text to replace must occur once in the file"
    for mutant in MUTANTS:
        for tests in mutant.killed_by:
            file, _, name = tests.partition(" ")[0].partition("::")
            text = (ROOT / file).read_text("utf-8")
            assert not name or f"def {name.partition('[')[0]}(" in text, (mutant.name, tests)
    changed(*_FOLDER_OF_C, new="")
    changed(*_SELF_TEST, new="")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_see(mutant: Mutant, run: Run, tmp_path: Path) -> None:
    if mutant.file.endswith(".py"):  # it must not fail by a name that is no longer there
        right, wrong = path_of(mutant.file).read_text("utf-8"), changed(mutant.file, mutant.old, mutant.new)
        there = compile(right, mutant.file, "exec")
        unknown = names_read(compile(wrong, mutant.file, "exec")) - names_read(there) - {*there.co_names}
        assert not unknown - {*dir(builtins)}
    variables = mutated(mutant, tmp_path)
    for tests in mutant.killed_by:
        status = run(command(mutant, tests), variables, tmp_path / "output")
        output = (tmp_path / "output").read_text("utf-8")
        assert seen(status, output), f"{tests} do not see it (status {status}):\n{output[-3000:]}"

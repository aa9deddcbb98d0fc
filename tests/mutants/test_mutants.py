"""The tests can fail: each deliberate bug of ``mutants`` is seen by the quick tests that guard its place.

A mutant is a text of the source and a wrong one in its place. A process of its own runs the tests that must
fail with it; ``hook/sitecustomize.py`` compiles the wrong text there, and the source on disk stays as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
HOOK = Path(__file__).parent / "hook"
PACKAGES = {"outpace": ROOT / "src", "outpace_lab": ROOT / "lab" / "src"}
_SECONDS = 300  # a mutant may never end
_FOLDER_OF_C = "FOLDER = Path(__file__).parent  # of the sources"


def path_of(mutant: Mutant) -> Path:
    return PACKAGES[mutant.file.partition("/")[0]] / mutant.file


def mutated(mutant: Mutant, folder: Path) -> dict[str, str]:
    """The variables of the hook, and the wrong text, written below ``folder``.

    A file in C is wrong in a copy of its folder, which ``native/build.py`` is told to compile from; what is
    compiled is not kept in the user's cache.
    """
    source, text = path_of(mutant), folder / "mutated.py"
    wrong = source.read_text("utf-8").replace(mutant.old, mutant.new)
    variables = {}
    if source.suffix == ".c":
        copies = folder / "native"
        copies.mkdir()
        for file in source.parent.glob("*.c"):
            (copies / file.name).write_text(wrong if file == source else file.read_text("utf-8"), "utf-8")
        variables["OUTPACE_CACHE"] = str(folder / "cache")
        source = source.with_name("build.py")
        build = source.read_text("utf-8")
        assert build.count(_FOLDER_OF_C) == 1, "native/build.py no longer says where the sources are"
        wrong = build.replace(_FOLDER_OF_C, f"FOLDER = Path({str(copies)!r})")
    text.write_text(wrong, "utf-8")
    package = PACKAGES[mutant.file.partition("/")[0]]
    module = ".".join(source.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
    return variables | {"MUTANT_MODULE": module, "MUTANT_TEXT": str(text)}


def test_the_list_fits_the_source() -> None:
    stale = [m.name for m in MUTANTS if path_of(m).read_text("utf-8").count(m.old) != 1]
    assert not stale, "the text to replace must occur once in the file"
    assert not [m.name for m in MUTANTS if m.old == m.new or not m.killed_by]
    assert not [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1]
    for mutant in MUTANTS:
        for test in mutant.killed_by:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text("utf-8")
            assert not name or f"def {name.partition('[')[0]}(" in text, (mutant.name, test)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_see(mutant: Mutant, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    if mutant.only:
        command += ["-k", mutant.only]
    if mutant.reason:  # no quick test sees it
        command += ["-m", "slow"]
    found = subprocess.run(
        [*command, *mutant.killed_by],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | mutated(mutant, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
    )
    # An error before a test began, as of a text that cannot be imported, says nothing about the tests.
    failed = re.search(r"^\d+ failed", found.stdout.strip().rpartition("\n")[2].strip("= "))
    assert found.returncode == 1 and failed, f"not seen:\n{found.stdout[-3000:]}"

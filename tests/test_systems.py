"""Other systems, as far as this one can simulate them: no /proc, no POSIX, Windows' paths, no fork."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.loading import load
from parts import first

ROOT = Path(__file__).parent.parent
SOURCES = [*(ROOT / "src").rglob("*.py"), *(ROOT / "lab" / "src").rglob("*.py")]
# Modules and names that Windows lacks.
MODULES = {"fcntl", "grp", "pty", "pwd", "readline", "resource", "termios", "tty"}
NAMES = {
    "os": {
        "chown", "fork", "geteuid", "getpgid", "getuid", "killpg", "mkfifo", "register_at_fork",
        "sched_getaffinity", "setsid", "sysconf", "uname",
        "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK",
    },
    "signal": {"SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGXCPU", "setitimer"},
}  # fmt: skip
# Files that run on Linux or POSIX alone, and are told so by who imports them.
APART = {
    "program_worker.py": "--grade is refused without resource",
}
# Names that are reached on Linux alone, by file.
REACHED = {"pool.py": ("os.sysconf", "only once /proc was read")}


def posix(source: str) -> Iterator[str]:
    """What Windows lacks and a module would need: imports outside of ``try``, names without ``hasattr``."""
    tree = ast.parse(source)
    tried = {
        id(node)
        for one in ast.walk(tree)
        if isinstance(one, ast.Try)
        for part in one.body
        for node in ast.walk(part)
    }
    asked = set(re.findall(r"hasattr\((?:os|signal), \"(\w+)\"\)", source))
    asked |= {"SIGKILL"} if "killpg" in asked else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in tried:
            named = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            )
            yield from (f"line {node.lineno}: import {name}" for name in named if name in MODULES)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
            if name in NAMES.get(owner, ()) and name not in asked:
                yield f"line {node.lineno}: {owner}.{name}"


def test_what_windows_lacks_is_found() -> None:
    assert list(posix("import resource\nos.killpg(1, signal.SIGKILL)")) == [
        "line 1: import resource", "line 2: os.killpg", "line 2: signal.SIGKILL",
    ]  # fmt: skip
    assert not list(
        posix('try:\n    import resource\nexcept ImportError:\n    pass\nhasattr(os, "killpg") and os.killpg')
    )


def test_no_module_needs_what_windows_lacks() -> None:
    found = {
        str(path.relative_to(ROOT)): needs
        for path in SOURCES
        if path.name not in APART
        and (
            needs := [
                need
                for need in posix(path.read_text(encoding="utf-8"))
                if not need.endswith(REACHED.get(path.name, ("\n",))[0])
            ]
        )
    }
    assert not found


def test_nothing_forks() -> None:
    """Workers are started anew, as everywhere on Windows and by default on macOS."""
    for path in SOURCES:
        assert not re.search(
            r"\bos\.fork\b|\bimport multiprocessing|\bfrom multiprocessing", path.read_text("utf-8")
        ), path


# Takes from this process what Windows lacks, once others' packages are imported, and decodes.
ELSEWHERE = """
import importlib.abc, os, pathlib, signal, sys
import torch
import outpace, outpace.cli
outpace.load(device="cpu").engine("none")  # imports what others' packages import late
modules, names, platform = eval(sys.argv[1]), eval(sys.argv[2]), sys.argv[3]

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in modules:
    sys.modules.pop(name, None)
for owner, own in ((os, names["os"]), (signal, names["signal"])):
    for name in own:
        if hasattr(owner, name):
            delattr(owner, name)

def hidden(there):
    return lambda path, *a, **k: not str(path).startswith("/proc") and there(path, *a, **k)

for name in ("exists", "is_file", "is_dir"):
    setattr(pathlib.Path, name, hidden(getattr(pathlib.Path, name)))
read = pathlib.Path.open
def opened(path, *args, **options):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return read(path, *args, **options)
pathlib.Path.open = opened
sys.platform = platform
import outpace.serve.worker as worker
from outpace.native import build, draw, instructions, layers, move, pool, systems
build._SECONDS = 900  # on a busy machine
instructions.sysctl = instructions.feature = lambda _: False
systems.cores = lambda: 1
for function in (draw.functions, layers.functions, move.functions, pool.pool):
    function.cache_clear()
os.environ["OUTPACE_CACHE"] += "/anew"
print([str(functions) for functions in map(layers.functions, layers.DTYPES)])
print([str(functions()) for functions in (draw.functions, move.functions, pool.pool)])
worker._limit_memory(1 << 30), worker._limit_time(9)
loaded = outpace.load(device="cpu")
prompts, params = [loaded.encode("def add(a, b):")], outpace.SamplingParams(max_new_tokens=12)
answers = [
    loaded.engine(drafter).generate(prompts, params)
    for drafter in ("none", "suffix", "lookahead")
]
assert answers[0][0].tokens == answers[1][0].tokens == answers[2][0].tokens
print(len(answers[0][0].tokens), "tokens")
sys.argv = ["outpace", "generate", "--prompt", "def add(a, b):", "--max-new-tokens", "4"]
outpace.cli.main()
"""


def decoded(platform: str, tmp_path: Path, **variables: str) -> str:
    """What is printed by a process on such a system."""
    found = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, repr(MODULES), repr(NAMES), platform],
        env={**os.environ, "OUTPACE_CACHE": str(tmp_path), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not found.returncode, found.stderr
    assert "12 tokens" in found.stdout
    kept = [
        path.name for path in (tmp_path / "anew").rglob("*")
    ]  # in a folder that knows no case, two would be one
    assert kept == [name.casefold() for name in kept]
    return found.stdout


@pytest.mark.parametrize("platform", first(1, ["win32", "darwin"]))
def test_decoding_needs_neither_proc_nor_posix_nor_a_compiler(platform: str, tmp_path: Path) -> None:
    assert "there is no program 'no-such-compiler'" in decoded(platform, tmp_path, CC="no-such-compiler")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="nothing is compiled here")
@pytest.mark.parametrize(("platform", "ending"), [("win32", ".dll"), ("darwin", ".dylib")])
def test_compiled_functions_need_neither_proc_nor_posix(platform: str, ending: str, tmp_path: Path) -> None:
    """A compiler as Windows finds it, for libraries that this system loads."""
    compiler = tmp_path / "cc.EXE"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} -fPIC "$@"\n')
    compiler.chmod(0o755)
    said = decoded(platform, tmp_path, CC=str(compiler))
    assert "no program" not in said and said.count("<CDLL") == 5
    assert said.count(ending) == 5 == len(list((tmp_path / "anew" / "native").glob(f"*{ending}")))


def test_names_of_files_are_of_every_system() -> None:
    """Windows and macOS know no case in names, and Windows reserves some."""
    names = [
        str(path.relative_to(ROOT))
        for folder in ("src", "tests", "lab", "docs", "tools", "examples", "integrations")
        for path in (ROOT / folder).rglob("*")
        if "__pycache__" not in path.parts
    ]
    assert len(names) == len({name.casefold() for name in names})
    reserved = re.compile(
        r"(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.[^/]*)?(/|$)|[<>:\"|?*\\]|[. ](/|$)", re.IGNORECASE
    )
    assert len(names) > 500 and not [name for name in names if reserved.search(name)]
    assert (
        reserved.search("src/aux.py") and reserved.search("a/b:c") and not reserved.search("src/auxiliary.py")
    )


def test_paths_of_windows_are_paths() -> None:
    path = r"C:\Users\me\drafts"
    drafter = load_drafter(f"draft_model:model={path},num_speculative_tokens=3")
    assert vars(drafter)["model"] == path
    with pytest.raises(OutpaceError, match="drafts"):
        load(path)

"""Compiled functions: what is loaded from the cache folder, and what a compiler may do."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace import embedded, files
from outpace.native import build, instructions, layers, packaged, systems
from outpace.native.systems import SYSTEMS

NOBODY = 65534
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # Windows' names
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="nothing is compiled here"
)


class Place:
    """A C file whose function returns 7, and the folder that its library is kept in."""

    def __init__(self, base: Path) -> None:
        self.folder = base / "cache" / "native"
        self.made: list[bytes] = []  # what a compiler made, and may be loaded
        self.source = base / "seven.c"
        self.source.write_text("int seven(void) { return 7; }\n")

    def load(self) -> Any:
        return build.compiled(self.source, {"seven": (ctypes.c_int, [])})

    @property
    def library(self) -> Path:
        [found] = self.folder.iterdir()
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder with nothing compiled yet; what reaches the loader must be what the compiler made."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    for cached in (build._warned, build._temporary, build._compiler):
        cached.cache_clear()
    found, library = Place(tmp_path), build._Compiler.library

    def noted(self: Any, options: Any) -> bytes:
        found.made.append(library(self, options))
        return found.made[-1]

    def load(path: str) -> ctypes.CDLL:
        data = Path(path).read_bytes()
        assert data in found.made
        # A copy: the process would die of what the tests do to a file that it has loaded.
        copy = tmp_path / f"loaded {len(list(tmp_path.iterdir()))}"
        copy.write_bytes(data)
        return ctypes.CDLL(str(copy))

    monkeypatch.setattr(build._Compiler, "library", noted)
    monkeypatch.setattr(build, "CDLL", load)
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    caplog.clear()
    return found


def library_of_another(folder: Path, result: int) -> Path:
    """A library that somebody else built, which loads."""
    source, library = folder / "other.c", folder / "other.so"
    source.write_text(f"int seven(void) {{ return {result}; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def replaced(path: Path) -> None:
    path.write_bytes(library_of_another(path.parents[2], 13).read_bytes())


def replaced_with_digest(path: Path, data: bytes = b"") -> Path:
    """Put another library in a file's place, under a name with its digest."""
    library = data or library_of_another(path.parents[2], 13).read_bytes()
    other = path.with_name(packaged.sealed(path.stem.rpartition("-")[0], library, path.suffix))
    path.unlink()
    build._write(other, library)
    return other


def owned_by_another(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(replaced_with_digest(path), NOBODY, NOBODY)


def zeroed(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4096] + bytes(4096) + data[8192:])


def linked(path: Path) -> None:
    other = replaced_with_digest(path)
    other.symlink_to(other.rename(path.parents[1] / "elsewhere.so"))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


HARMS: dict[str, Callable[[Path], Any]] = {
    "replaced": replaced,
    "owned by another user": owned_by_another,
    "open to the group": lambda path: replaced_with_digest(path).chmod(0o660),
    "open to all": lambda path: replaced_with_digest(path).chmod(0o606),
    "a page of zeros": zeroed,
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5000]),
    "empty": lambda path: path.write_bytes(b""),
    "a link": linked,
    "a pipe": a_pipe,
}


def test_another_included_file_is_another_library(place: Place) -> None:
    place.source.write_text('#include "number.h"\nint seven(void) { return NUMBER; }\n')
    for number in (7, 8):
        (place.source.parent / "number.h").write_text(f"#define NUMBER {number}\n")
        assert place.load().seven() == number


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_file_that_is_not_as_it_was_written_is_made_again(
    place: Place, harm: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert place.load().seven() == 7 and not warnings(caplog)
    harm(place.library)
    harmed = place.library.name
    assert place.load().seven() == 7
    [warning] = warnings(caplog)
    assert f"the library {harmed} is compiled again: " in warning
    assert stat.S_IMODE(place.library.stat().st_mode) == 0o600 and place.library.stat().st_uid == os.geteuid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build._Compiler, "library", lambda *_: pytest.fail("it was compiled again"))
        assert place.load().seven() == 7 and not warnings(caplog)


@pytest.mark.parametrize(
    ("mode", "owner", "why"),
    [
        (0o770, None, "others may write to it"),
        (0o1777, None, "others may write to it"),
        (0o755, NOBODY, "user 65534 owns it"),
    ],
)
def test_a_folder_that_others_may_write_to_is_refused(
    place: Place, mode: int, owner: int | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    if owner is not None and os.geteuid():
        pytest.skip("only root gives folders away")
    assert place.load().seven() == 7
    place.folder.chmod(mode)
    if owner is not None:
        os.chown(place.folder, owner, owner)
    expected = f"code in {place.folder} is not loaded, since {why}; make it yours alone (chmod 700)"
    assert expected in place.load() and expected in place.load()
    assert len(warnings(caplog)) == 1
    assert stat.S_IMODE(place.folder.stat().st_mode) == mode


def test_a_folder_of_this_user_may_be_read_by_others_and_a_new_one_may_not(place: Place) -> None:
    before = os.umask(0)
    try:
        assert place.load().seven() == 7
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
    place.folder.chmod(0o755)
    assert place.load().seven() == 7


def test_a_library_that_cannot_be_loaded_is_made_again_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert place.load().seven() == 7
    for whole in (True, False):
        place.made[1:] = [b"no library"]
        replaced_with_digest(place.library, b"no library")
        if not whole:
            monkeypatch.setattr(
                build._Compiler, "library", lambda *_: place.made.append(b"") or b"no library"
            )
        found = place.load()
        assert whole or f"{shutil.which('cc')} made a library that cannot be loaded: " in found
        assert len(place.made) == 3
        first, *others = warnings(caplog)
        assert "is compiled again" in first and len(others) == (not whole)


def test_two_processes_that_compile_at_once_both_have_the_functions(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library, inner = build._Compiler.library, []

    def beside(self: Any, options: Any) -> bytes:
        monkeypatch.setattr(build._Compiler, "library", library)
        inner.append(place.load().seven())  # the other one's, while this one compiles
        return library(self, options)

    monkeypatch.setattr(build._Compiler, "library", beside)
    assert place.load().seven() == 7 == inner[0]
    assert not build._why_untrusted(place.library) and not warnings(caplog)


def test_a_compiler_may_be_named_with_words_before_and_after(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "env WHO=me cc '-DUNUSED=a b'")
    assert place.load().seven() == 7
    monkeypatch.setenv("CC", "cc '-O1")
    assert "cannot be split into words: No closing quotation" in place.load()
    caplog.clear()
    monkeypatch.setenv("CC", "nonesuch -O1")
    assert "there is no program 'nonesuch'" in place.load()
    assert len(warnings(caplog)) == 1
    monkeypatch.setenv("CC", " ")
    assert place.load().seven() == 7


def test_a_compiler_that_hangs_is_killed_with_its_children_and_not_asked_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, script, readers = tmp_path / "pipe", tmp_path / "hangs", []
    os.mkfifo(pipe)
    # A child opens the pipe, and writes to it later if it is left; the reader waits for its end.
    script.write_text(f"#!/bin/sh\n(exec 9>{pipe}; sleep 30; echo late >&9) &\nwait\n")
    script.chmod(0o755)
    wait = subprocess.Popen.wait

    def waited(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        assert timeout == build._SECONDS
        readers.append(pipe.open())  # the child has begun
        raise subprocess.TimeoutExpired("cc", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waited)
    monkeypatch.setenv("CC", str(script))
    expected = f"{script} did not end within {build._SECONDS} seconds; set CC to another compiler"
    assert place.load() == expected
    [reader] = readers
    assert reader.read() == ""
    reader.close()
    assert place.load() == expected
    assert len(readers) == 1 and len(warnings(caplog)) == 1


SEPARATE = """
import ctypes, logging, pathlib, sys
from outpace.native import build, layers
logging.basicConfig()
loaded = []
build.CDLL = lambda path: loaded.append(str(pathlib.Path(path).resolve())) or ctypes.CDLL(path)
for _ in range(2):
    assert build.compiled(pathlib.Path(sys.argv[1]), {"seven": (ctypes.c_int, [])}).seven() == 7
print(loaded[0])
"""


def test_where_nothing_can_be_written_a_folder_of_the_process_is_used(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = subprocess.run(
        [sys.executable, "-c", SEPARATE, str(place.source)],
        env={**os.environ, "OUTPACE_CACHE": str(tmp_path / "file" / "cache"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not found.returncode, found.stderr
    library = Path(found.stdout.strip())
    assert library.parents[1] == tmp_path and not library.parent.exists()
    assert found.stderr.count("WARNING") == 1
    assert "since they cannot be kept: [Errno 20] Not a directory" in found.stderr


def test_a_user_without_a_home_folder_has_compiled_functions(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("OUTPACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(embedded.Path, "home", home)
    assert place.load().seven() == 7
    assert "the user has no home folder; set OUTPACE_CACHE" in warnings(caplog)[0]
    with pytest.raises(embedded.NoHome):
        embedded.smollm2_path()


LACKING = {"O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "killpg", "geteuid"}  # on Windows
WINDOWS = SimpleNamespace(**{name: value for name, value in vars(os).items() if name not in LACKING})


def elsewhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take from the modules what a system lacks; on Linux /proc alone."""
    monkeypatch.setattr(build, "_PROC", tmp_path / "proc")
    monkeypatch.setenv("CC", "cc -fPIC")  # which Windows' libraries do without
    for module in (build, systems, instructions):
        monkeypatch.setattr(module, "sys", SimpleNamespace(platform=name, executable=sys.executable))
    if name == "win32":
        for module in (build, files):
            monkeypatch.setattr(module, "os", WINDOWS)
        monkeypatch.setattr("sysconfig.get_platform", lambda: f"win-{MACHINES[platform.machine()]}")
    for asked in ("sysctl", "feature"):
        monkeypatch.setattr(instructions, asked, lambda _: False)


@pytest.mark.parametrize("name", SYSTEMS)
def test_other_systems_have_compiled_functions(
    name: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere(name, tmp_path, monkeypatch)
    assert place.load().seven() == 7 and place.library.suffix == SYSTEMS[name].ending
    replaced(place.library)
    assert place.load().seven() == 7
    assert "it is damaged" in warnings(caplog)[0]
    monkeypatch.setattr(build._Compiler, "library", lambda *_: pytest.fail("it was compiled again"))
    assert place.load().seven() == 7 and not warnings(caplog)


def test_a_library_in_use_is_not_written_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows replaces none; another process may have made it while this one compiled."""
    library = build._Compiler.library

    def late(self: Any, options: Any) -> bytes:
        monkeypatch.setattr(build._Compiler, "library", library)
        assert place.load().seven() == 7
        monkeypatch.setattr(build, "_write", lambda *_: pytest.fail("it was written again"))
        return library(self, options)

    monkeypatch.setattr(build._Compiler, "library", late)
    assert place.load().seven() == 7


@pytest.mark.parametrize("name", ["linux", "darwin"])
def test_without_descriptors_folders_above_may_be_nobody_elses_either(
    name: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere(name, tmp_path, monkeypatch)
    above = place.folder.parent
    for mode in (0o755, 0o1777, 0o777, 0o775):
        above.mkdir(exist_ok=True)
        above.chmod(mode)
        build._warned.cache_clear()
        if mode in (0o755, 0o1777):  # where everybody removes only what is theirs
            assert place.load().seven() == 7
        else:
            assert f"is not loaded, since of {above} above it: others may write to it" in place.load()


def test_a_library_that_shows_no_functions_is_refused(place: Place) -> None:
    place.source.write_text("static int seven(void) { return 7; }\nint (*other)(void) = seven;\n")
    assert "the library of seven.c shows no function seven; install gcc or clang, or zig" in place.load()


@pytest.mark.parametrize(
    ("name", "programs", "zig", "expected"),
    [
        ("linux", {"cc"}, True, ["/bin/cc"]),
        ("linux", set(), True, [sys.executable, "-m", "ziglang", "cc"]),
        ("darwin", {"cc"}, False, ["/bin/cc"]),
        ("win32", {"clang", "cc"}, True, [sys.executable, "-m", "ziglang", "cc"]),
        ("win32", {"clang", "cc"}, False, ["/bin/clang"]),
        (
            "win32",
            {"cc"},
            False,
            "there is no C compiler; install gcc or clang, or zig (pip install ziglang), or set CC",
        ),
    ],
)
def test_the_compiler_that_is_used_without_a_name(
    name: str, programs: set[str], zig: bool, expected: list[str] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "sys", SimpleNamespace(platform=name, executable=sys.executable))
    monkeypatch.setattr(shutil, "which", lambda word: f"/bin/{word}" if word in programs else None)
    monkeypatch.setattr(build, "find_spec", lambda package: package if zig else None)
    assert build.compiler_command() == expected


def test_paths_of_windows_name_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(shutil, "which", lambda word: word)
    monkeypatch.setenv("CC", r'"C:\Program Files\LLVM\bin\clang.exe" -v')
    assert build.compiler_command() == [r"C:\Program Files\LLVM\bin\clang.exe", "-v"]


def test_a_compiler_that_hangs_is_ended_by_a_program_of_windows(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere("win32", tmp_path, monkeypatch)
    monkeypatch.setenv("CC", "cat")
    run: list[list[str]] = []
    wait = subprocess.Popen.wait

    def waited(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        run.append([str(process.pid)])
        raise subprocess.TimeoutExpired("cat", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waited)
    monkeypatch.setattr(subprocess, "run", lambda command, check: run.append(command))
    assert "did not end within" in place.load()
    [[process], ended] = run
    assert ended == ["taskkill", "/T", "/F", "/PID", process]


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int32), ("second", ctypes.c_int64))


class Longer(ctypes.Structure):
    _fields_ = (*Pair._fields_, ("third", ctypes.c_int32))


def test_a_struct_of_another_size_is_refused(place: Place) -> None:
    place.source.write_text(
        "struct pair { int first; long second; };\nlong size_of_pair(void) { return sizeof(struct pair); }\n"
    )
    assert isinstance(build.compiled(place.source, {}, structs={"pair": Pair}), ctypes.CDLL)
    assert build.compiled(place.source, {}, structs={"pair": Longer}) == (
        "struct pair of seven.c has 16 bytes and Longer 24; make them alike"
    )


@pytest.mark.parametrize("name", layers.STRUCTS)
def test_what_layers_are_told_is_what_they_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(layers.STRUCTS[name]):  # type: ignore[name-defined, misc]
        _fields_ = (("more", ctypes.c_void_p),)

    assert isinstance(layers.functions.__wrapped__(torch.float32), ctypes.CDLL)
    monkeypatch.setitem(layers.STRUCTS, name, Changed)
    assert f"struct {name} of layers.c has" in layers.functions.__wrapped__(torch.float32)

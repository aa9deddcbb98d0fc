"""Functions in C: those that the wheel carries for the processor, or compiled with its compiler on first use.

``OUTPACE_CPU`` limits the instructions that they use (``instructions``). What is compiled here is kept in the
user's cache folder.

A library is code, so it is loaded only if nobody else can have written it: from a folder and a file of this
user that are not open to others, with the digest that its name has. The folder is read through its
descriptor: users who may write to the folders above can put another in its place, but not in the place of the
one that was checked. Where there are no paths by descriptors (macOS), nobody else may write to the folders
above either; on Windows, which has other rights, nothing of this is looked at. A file that is not trusted, is
damaged or cannot be loaded is made again. A library of the wheel lies beside this module, and is trusted as
far as this module is.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import CDLL, Structure, c_int64, sizeof
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from platform import processor
from types import MappingProxyType
from typing import Any, NamedTuple

from outpace.core import OutpaceError, first_line
from outpace.embedded import CACHE, NoHome, cache_path
from outpace.files import why_foreign, why_reachable
from outpace.native import packaged
from outpace.native.instructions import LIMITS, NATIVE, chosen, instructions
from outpace.native.packaged import FLAGS, FOLDER, digest, kept, sealed, text_of, whole
from outpace.native.systems import Platform, here, is_zig

_log = logging.getLogger(__name__)
_SECONDS = 120  # of a compiler; it needs about seven, several times that on a busy machine
_PROC = Path("/proc")
_INSTALL = "install gcc or clang, or zig (pip install ziglang), or set CC"

# Name of a function -> types of its result and of its arguments.
Signatures = Mapping[str, tuple[Any, list[Any]]]
NO_STRUCTS: Mapping[str, type[Structure]] = MappingProxyType({})


def compiled(
    source: Path, signatures: Signatures, *flags: str, structs: Mapping[str, type[Structure]] = NO_STRUCTS
) -> CDLL | str:
    """The functions of a C file; the reason why there are none here.

    Args:
        flags: further options of the compiler.
        structs: name of a struct in C -> what Python fills; the file's ``size_of_NAME()`` returns its size.
    """
    platform = here()
    if isinstance(platform, str):
        return platform
    found = _carried(source, flags, platform) or _made(source, flags, platform)
    if isinstance(found, str):
        return found
    if absent := [name for name in signatures if not hasattr(found, name)]:
        return _warned(f"the library of {source.name} shows no function {absent[0]}; {_INSTALL}")
    for function_name, (result, arguments) in signatures.items():
        function = getattr(found, function_name)
        function.restype, function.argtypes = result, arguments
    for struct_name, kind in structs.items():
        size = getattr(found, f"size_of_{struct_name}")
        size.restype, size.argtypes = c_int64, []
        if size() != sizeof(kind):  # what follows a field of another size would be read in another place
            names = f"struct {struct_name} of {source.name}", kind.__name__
            return _warned(f"{names[0]} has {size()} bytes and {names[1]} {sizeof(kind)}; make them alike")
    return found


def _carried(source: Path, flags: Sequence[str], platform: Platform) -> CDLL | None:
    """The library that the wheel carries; None if none fits, or it is not as the wheel was built."""
    limit = packaged.fitting(platform.machine, instructions(), chosen())
    if limit is None or source.parent != FOLDER:
        return None
    trusted = why_foreign(Path(__file__).stat())
    for path in kept(packaged.LIBRARIES, packaged.name_of(source, limit.march, (*FLAGS, *flags))):
        why = _why_untrusted(path, trusted)
        if not why:
            try:
                return CDLL(str(path))
            except OSError as error:
                why = first_line(error)
        _log.warning("the package's library %s is not used: %s; it is compiled here", path.name, why)
    return None


def compiler_command() -> list[str] | str:
    """The words that call the C compiler, its path first; the reason why there is none."""
    named = os.environ.get("CC", "")
    windows = sys.platform == "win32"
    try:
        words = shlex.split(
            named, posix=not windows
        )  # such as "ccache gcc"; paths of Windows have backslashes
    except ValueError as error:
        return _warned(f"CC={named!r} cannot be split into words: {error}; quote it as a shell does")
    if words:
        words = [word.strip('"') for word in words] if windows else words
        if program := shutil.which(words[0]):
            return [program, *words[1:]]
        # A mistake, which is told; that a machine has no compiler is told where it matters.
        return _warned(f"CC={named!r}: there is no program {words[0]!r}; name one, or leave CC out")
    # What is called clang on Windows often lacks the system's headers, which zig brings along.
    zig = [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") is not None else []
    usual = "clang" if windows else "cc"
    found = [program] if (program := shutil.which(usual)) else []
    return (zig or found if windows else found or zig) or f"there is no C compiler; {_INSTALL}"


def _made(source: Path, flags: Sequence[str], platform: Platform) -> CDLL | str:
    """The library that is compiled here, now or before; the reason why there is none."""
    command = compiler_command()
    if isinstance(command, str):
        return command
    # Tuned for a processor (AMD's Zen), gcc does not fuse some products with sums, and their bits are others
    # than those of a wheel's functions.
    tune = ["-mtune=generic"] if platform.machine == "x86_64" and not is_zig(command) else []
    system, own = platform.system, platform.options(_march(platform, command), command)
    options = [*own, *tune, *FLAGS, *flags, str(source), *system.libraries]
    about = "\n".join([*command, *options, text_of(source), platform.machine, _processor()])
    try:
        return _library(_Wanted(digest(about.encode()), system.ending, options), _compiler(*command))
    except (OSError, OutpaceError) as error:
        _log.debug("%s is not compiled", source.name, exc_info=True)
        return _warned(first_line(error))


def _march(platform: Platform, command: Sequence[str]) -> str:
    """The compiler's name of the instructions to use: those that the functions know and there are."""
    if limit := chosen():
        return limit.march
    x86 = platform.machine == "x86_64"
    if x86 and not is_zig(command):
        return NATIVE
    fitting = packaged.fitting(platform.machine, instructions(), None)
    return fitting.march if fitting else LIMITS["x86-64"].march if x86 else NATIVE


@lru_cache(maxsize=32)
def _warned(reason: str) -> str:
    """The reason, after one warning: without these functions steps are slow."""
    _log.warning("functions in C are not used: %s", reason)
    return reason


class _Wanted(NamedTuple):
    """A library to be had.

    Attributes:
        name, ending: what its file's name begins and ends with.
        options: of the compiler.
    """

    name: str
    ending: str
    options: Sequence[str]


def _library(wanted: _Wanted, compiler: _Compiler) -> CDLL:
    """A library, from the cache folder; where none can be written, from a folder of this process.

    Raises:
        OutpaceError: the folder is not trusted, or the library cannot be compiled or loaded.
        OSError: no folder can be written.
    """
    try:
        with _opened(cache_path() / "native") as folder:
            return _loaded(folder, wanted, compiler)
    except (OSError, NoHome) as error:
        temporary = _temporary(os.getpid(), first_line(error))
    with _opened(temporary) as folder:
        return _loaded(folder, wanted, compiler)


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """A path to a folder, made if there is none, that stays that folder's.

    One that is open to others is refused, as ssh does, and not closed to them: its owner has to look at it.
    To read it does no harm.

    Raises:
        OutpaceError: another user owns it, or others may write to it, or put another in its place.
        OSError: it cannot be made or read.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if sys.platform != "linux" or not (_PROC / "self/fd").is_dir():
        real = folder.resolve()
        _check(folder, why_foreign(real.stat()) or why_reachable(real))
        yield real
        return
    opened = os.open(folder, _flags("O_DIRECTORY", "O_CLOEXEC"))
    try:
        _check(folder, why_foreign(os.fstat(opened)))
        yield _PROC / f"self/fd/{opened}"
    finally:
        os.close(opened)


def _check(folder: Path, why: str | None) -> None:
    if why:
        raise OutpaceError(
            f"code in {folder} is not loaded, since {why}; make it yours alone (chmod 700), or set "
            f"{CACHE} to another folder"
        )


def _flags(*names: str) -> int:
    """Flags to read with, those that the system has."""
    return os.O_RDONLY | sum(getattr(os, name, 0) for name in names)


def why_compiled_anew() -> str | None:
    """The reason why libraries are compiled anew in each process; None if they are kept, or carried."""
    platform = here()
    if isinstance(platform, Platform) and _carried(FOLDER / "move.c", (), platform) is not None:
        return None
    try:
        with _opened(cache_path() / "native") as folder:
            return None if os.access(folder, os.W_OK) else f"{cache_path()} cannot be written"
    except (OSError, NoHome) as error:
        return first_line(error)
    except OutpaceError:  # open to others: nothing is compiled, for which there is another reason
        return None


@lru_cache(maxsize=1)
def _temporary(process: int, reason: str) -> Path:
    """A folder of this process (a fork has its own), removed at its end; a warning gives the reason."""
    folder = Path(tempfile.mkdtemp(prefix="outpace-native-"))

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    _log.warning(
        "functions in C are compiled anew in each process, since they cannot be kept: %s; set %s to a "
        "folder that can be written",
        reason,
        CACHE,
    )
    return folder


def _loaded(folder: Path, wanted: _Wanted, compiler: _Compiler) -> CDLL:
    """Load a library, compiled if there is none; made again, once, if it cannot be trusted or loaded.

    Raises:
        OutpaceError: it cannot be compiled or loaded.
        OSError: it cannot be written.
    """
    for path in kept(folder, wanted.name):
        why = _why_untrusted(path)
        if not why:
            try:
                return CDLL(str(path))
            except OSError as error:
                why = first_line(error)
        _log.warning("the library %s is compiled again: %s", path.name, why)
        with suppress(OSError):  # where it stays, there will be two, and this warning again
            path.unlink()
    library = compiler.library(wanted.options)
    made = folder / sealed(wanted.name, library, wanted.ending)
    if _why_untrusted(made):  # Windows replaces no library that another process has loaded
        _write(made, library)
    try:
        return CDLL(str(made))
    except OSError as error:
        raise OutpaceError(f"{compiler} made a library that cannot be loaded: {first_line(error)}") from None


def _why_untrusted(path: Path, allowed: str | None = None) -> str | None:
    """The reason not to load a file; None if it is as this user wrote it.

    Args:
        allowed: a reason of ``why_foreign`` that does not count.
    """
    try:
        opened = os.open(path, _flags("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    except OSError as error:  # a link, or it may not be read
        return error.strerror or str(error)
    with os.fdopen(opened, "rb") as file:
        status = os.fstat(opened)
        if (why := why_foreign(status)) and why != allowed:
            return why
        data = file.read() if stat.S_ISREG(status.st_mode) else b""
    return None if whole(path.name, data) else "it is damaged"


def _write(path: Path, library: bytes) -> None:
    """Put a library in place as a whole: a reader finds all of it, or nothing."""
    opened, part = tempfile.mkstemp(dir=path.parent)  # readable and writable by this user alone
    try:
        with os.fdopen(opened, "wb") as file:
            file.write(library)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


class _Compiler:
    """A compiler, with options of its own; it is not called again once it has not ended in time."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self._late = ""

    def __str__(self) -> str:
        return shlex.join(self.command)

    def library(self, options: Sequence[str]) -> bytes:
        """Compile a library.

        Raises:
            OutpaceError: it fails, or does not end.
        """
        if self._late:
            raise OutpaceError(self._late)
        with tempfile.TemporaryDirectory(prefix="outpace-compiled-") as folder:
            made, messages = Path(folder) / "made", Path(folder) / "messages"
            try:
                status = self._status([*options, "-o", str(made)], messages)
            except OSError as error:
                raise OutpaceError(f"{self} could not compile them: {first_line(error)}") from None
            if status is None:
                self._late = f"{self} did not end within {_SECONDS} seconds; set CC to another compiler"
                raise OutpaceError(self._late)
            if status or not made.is_file():
                said = packaged.complaint(messages.read_text("utf-8", errors="replace"))
                raise OutpaceError(f"{self} could not compile them: {said or f'exit status {status}'}")
            return made.read_bytes()

    def _status(self, options: Sequence[str], messages: Path) -> int | None:
        """Run it; its exit status, None if it did not end in time. What it started ends with it."""
        with messages.open("wb") as file:
            process = subprocess.Popen(
                [*self.command, *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                return process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.returncode is None:  # an interrupt too
                    if hasattr(os, "killpg"):
                        os.killpg(process.pid, signal.SIGKILL)
                    else:  # Windows ends a process with its children by a program
                        subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], check=False)
                    process.wait()


@lru_cache(maxsize=8)
def _compiler(*command: str) -> _Compiler:
    return _Compiler(command)


def _processor() -> str:
    """The processor's name and instruction sets, since a cache folder may be shared by machines."""
    file = _PROC / "cpuinfo"
    if not file.exists():
        return "\n".join([processor(), *sorted(instructions())])
    lines = file.read_text("utf-8", errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))

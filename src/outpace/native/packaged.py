"""Functions in C as a platform wheel carries them: compiled once for each of several sets of instructions.

A library's name begins with a digest of its source, with the files that it includes, and of its flags, so one
of another source is never found. It ends with a digest of the library itself, which is compared before it is
loaded. A wheel is built where torch is not installed, so this imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from outpace.core import OutpaceError
from outpace.native.instructions import ELSEWHERE, LIMITS, Limit
from outpace.native.systems import Platform, here

FOLDER = Path(__file__).parent  # of the sources
LIBRARIES = FOLDER / "libraries"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-shared")
GCC = 11  # the first version that has every set
_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_DIGITS = 32  # of a digest in a name
# Sources, with the flags of each form: those that the modules beside them ask for.
FORMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("pool.c", ()),
    ("draw.c", ()),
    ("move.c", ()),
    ("layers.c", ()),
    ("layers.c", ("-DREAL16",)),
)
# Kind of processor -> the sets that libraries are compiled for, the best one first.
SETS: dict[str, tuple[Limit, ...]] = {
    "x86_64": (LIMITS["amx"], LIMITS["avx512-bf16"], LIMITS["avx512"], LIMITS["avx2"]),
    # Every one has NEON.
    "aarch64": (LIMITS["armv8-i8mm"], LIMITS["armv8-bf16"], LIMITS["armv8-dot"], LIMITS["armv8"]),
}


def fitting(machine: str, found: Collection[str], limit: Limit | None) -> Limit | None:
    """The best set that a processor has; None if there is none.

    Args:
        machine: kind of the processor, as Python calls it.
        found: the instructions that it has.
        limit: the one set that steps may use.
    """
    sets = SETS.get(machine, ())
    return next((one for one in sets if limit in (None, one) and one.needs.issubset(found)), None)


def files_of(source: Path) -> list[Path]:
    """A source, and the files beside it that it includes, or that these include."""
    files = [source]
    for file in files:  # which grows
        included = _INCLUDED.findall(file.read_text("utf-8"))
        files += [path for name in included if (path := file.parent / name) not in files]
    return files


def text_of(source: Path) -> str:
    """The text of a source and of the files that it includes: what a library is made of."""
    return "\n".join(file.read_text("utf-8") for file in files_of(source))


def name_of(source: Path, march: str, flags: Sequence[str]) -> str:
    """What the file names of a library begin with.

    Args:
        march: the compilers' name of its set of instructions.
        flags: the compiler's other options.
    """
    about = "\n".join([march, *flags, text_of(source)])
    return f"{source.stem}-{march}-{digest(about.encode())}"


def sealed(name: str, library: bytes, ending: str) -> str:
    """The file name of a library, with its digest: a system may refuse bytes behind a library in its file."""
    return f"{name}-{digest(library)}{ending}"


def whole(name: str, data: bytes) -> bool:
    """True if a file's content is the library that its name tells of."""
    return Path(name).stem.endswith(f"-{digest(data)}")


def digest(data: bytes) -> str:
    """A digest as it stands in a name."""
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def kept(folder: Path, name: str) -> list[Path]:
    """The files of a library in a folder: one, unless an old one could not be removed."""
    return (
        sorted(path for path in folder.iterdir() if path.name.startswith(f"{name}-"))
        if folder.is_dir()
        else []
    )


def complaint(messages: str) -> str:
    """What a compiler says is wrong: its first error, which may be behind warnings; else its first line."""
    lines = messages.strip().splitlines() or [""]
    return next((line for line in lines if "error:" in line), lines[0])


def sets_of(platform: Platform) -> tuple[Limit, ...]:
    """The sets that libraries are compiled for, the best one first: those that the system tells of."""
    sets = SETS.get(platform.machine, ())
    return tuple(one for one in sets if platform.name == "linux" or one.needs <= ELSEWHERE)


def make_libraries(folder: Path, compiler: str = "cc", platform: Platform | None = None) -> Iterator[Path]:
    """Compile each form for each set of a kind of processor; needs gcc 11, clang or zig.

    Args:
        platform: another one than this, for which the compiler makes libraries.

    Raises:
        OutpaceError: there are no sets for this processor, or the compiler fails.
    """
    found = platform or here()
    if isinstance(found, str):
        raise OutpaceError(found)
    if found.machine not in SETS:
        raise OutpaceError(f"libraries are compiled for {' and '.join(SETS)}, not for {found.machine}")
    folder.mkdir(parents=True, exist_ok=True)
    command, system = shlex.split(compiler), found.system
    for limit in sets_of(found):
        for source, flags in FORMS:
            path, name = (
                folder / f"made{system.ending}",
                name_of(FOLDER / source, limit.march, (*FLAGS, *flags)),
            )
            options = [*found.options(limit.march, command), *FLAGS, *flags, str(FOLDER / source)]
            _run(compiler, *options, "-o", str(path), *system.libraries)
            yield path.replace(folder / sealed(name, path.read_bytes(), system.ending))


def _run(compiler: str, *options: str) -> None:
    command = [*shlex.split(compiler), *options]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise OutpaceError(f"{compiler} cannot be run: {error.strerror}; set CC to gcc") from None
    if ended.returncode:
        raise OutpaceError(
            f"{shlex.join(command)} failed: {complaint(ended.stderr)}; to compile for every set of "
            f"instructions, as a wheel has them, set CC to gcc {GCC} or later, or to zig"
        )

"""What systems and compilers differ in, for functions in C: shared libraries, options, the processor.

A wheel is built where torch is not installed, so this imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import NamedTuple

from outpace.core import OutpaceError

_KINDS = {"amd64": "x86_64", "arm64": "aarch64"}  # Windows' and macOS's names
_ZIG = frozenset(("zig", "ziglang"))  # the compiler, and the package that has it
_CLANG_CL = frozenset(("clang-cl",))  # clang with the options of Microsoft's compiler, unless told otherwise


class System(NamedTuple):
    """An operating system.

    Attributes:
        label: what people call it.
        ending: of the name of a shared library.
        options: of compilers, for a shared library.
        libraries: of C that the functions need.
        zig: zig's name of it, with the oldest version that is served.
        tag: what the platform of a wheel begins with.
    """

    label: str
    ending: str
    options: tuple[str, ...]
    libraries: tuple[str, ...]
    zig: str
    tag: str


# Python's name of a system -> how functions are compiled for it.
SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        "linux": System("Linux", ".so", ("-fPIC",), ("-lm", "-lpthread"), "linux-gnu.2.28", "manylinux"),
        "darwin": System("macOS", ".dylib", ("-fPIC",), (), "macos.11.0", "macosx"),
        "win32": System("Windows", ".dll", (), (), "windows-gnu", "win"),
    }
)


class Platform(NamedTuple):
    """What a library is compiled for.

    Attributes:
        name: of the system, as Python calls it, one of ``SYSTEMS``.
        machine: kind of the processor, as Linux calls it.
    """

    name: str
    machine: str

    @property
    def system(self) -> System:
        """The system."""
        return SYSTEMS[self.name]

    def options(self, march: str, compiler: Sequence[str]) -> list[str]:
        """What tells a compiler the platform and a set of instructions.

        Args:
            march: gcc's and clang's name of the set.
            compiler: the words that call it.
        """
        if not is_zig(compiler):
            own = ["--driver-mode=gcc"] if named(compiler, _CLANG_CL) else []
            return [*own, f"-march={march}", *self.system.options]
        kind, *more = march.split("+")
        if self.machine == "aarch64":
            kind = "generic"
        cpu = "+".join([kind.replace("-", "_"), *more])
        return ["-target", f"{self.machine}-{self.system.zig}", f"-mcpu={cpu}", *self.system.options]


def machine() -> str:
    """The kind of processor that this process is compiled for, as Linux calls it."""
    # A process for x86-64 on an ARM processor is told of that one by Windows.
    named = sysconfig.get_platform().rpartition("-")[2] if sys.platform == "win32" else platform.machine()
    return _KINDS.get(named.lower(), named)


def here() -> Platform | str:
    """The platform of this process; the reason why nothing is compiled for it."""
    if sys.platform not in SYSTEMS:
        known = [system.label for system in SYSTEMS.values()]
        return f"compiled functions are for {', '.join(known)}, not {sys.platform}"
    return Platform(sys.platform, machine())


def platform_of(tag: str) -> Platform:
    """The platform of a wheel, by the tag in its name.

    Raises:
        OutpaceError: it is none of those that wheels with compiled functions are for.
    """
    word = tag.replace("linux", "manylinux") if tag.startswith("linux") else tag
    system = next((name for name, one in SYSTEMS.items() if word.startswith(one.tag)), None)
    kinds = ("x86_64", "aarch64", *_KINDS)
    kind = next((kind for kind in kinds if tag.endswith(f"_{kind}")), None)
    if system is None or kind is None:
        raise OutpaceError(
            f"there are no compiled functions for {tag!r}; set OUTPACE_LIBRARIES to a platform of wheels, "
            "such as manylinux_2_28_aarch64, macosx_11_0_arm64 or win_amd64"
        )
    return Platform(system, _KINDS.get(kind, kind))


def is_zig(compiler: Sequence[str]) -> bool:
    """True if zig compiles, which names platforms and processors in its own way."""
    return named(compiler, _ZIG)


def named(compiler: Sequence[str], names: Collection[str]) -> bool:
    """True if one of the words that call a compiler is, but for its folder and ending, one of the names."""
    return any(PurePath(word).stem.lower() in names for word in compiler)


# -- what macOS and Windows say about the processor; Linux has files -------------------------------------


def sysctl(name: str) -> int:
    """A number of macOS; 0 if it does not know it."""
    found, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    function = ctypes.CDLL(None).sysctlbyname
    function.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_size_t]
    function(name.encode(), ctypes.byref(found), ctypes.byref(size), None, 0)
    return found.value


def feature(number: int) -> bool:
    """Whether Windows says that the processor has something, by the number that Windows has for it."""
    return bool(ctypes.CDLL("kernel32").IsProcessorFeaturePresent(number))


def cores() -> int:
    """The cores of the fast kind on macOS, all on Windows; 0 on Linux."""
    if sys.platform == "darwin":
        return sysctl("hw.perflevel0.physicalcpu") or sysctl("hw.physicalcpu")
    if sys.platform == "win32":
        asked, size = ctypes.CDLL("kernel32").GetLogicalProcessorInformation, ctypes.c_uint32()
        asked(None, ctypes.byref(size))
        told = ctypes.create_string_buffer(size.value)
        asked(told, ctypes.byref(size))
        # Records of 32 bytes: a mask of processors, and what these have in common, 0 for a core.
        return sum(told.raw[at + 8 : at + 12] == bytes(4) for at in range(0, size.value, 32))
    return 0

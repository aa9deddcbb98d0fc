"""Read the libraries of wheels for other systems: python lab/tools/elsewhere.py WHEEL ...; needs lief, zig.

Each must be of its wheel's processor, one for each form and set, and show the functions that Python calls.
For Windows zig has another project's headers; so the sources are also compiled as clang-cl takes them, with
what microsoft.h declares.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import lief
import ziglang

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from outpace.native.packaged import FLAGS, FOLDER, FORMS, sets_of, text_of, whole
from outpace.native.systems import Platform, platform_of

_CALLED = re.compile(r"^SHOWN \w[\w *]*?\b(\w+)\(", re.MULTILINE)
_MACHINES = {
    "x86_64": ("ARCH.X86_64", "CPU_TYPE.X86_64", "MACHINE_TYPES.AMD64"),
    "aarch64": ("ARCH.AARCH64", "CPU_TYPE.ARM64", "MACHINE_TYPES.ARM64"),
}


def main(wheels: list[str]) -> None:
    """Exit with a message if something is amiss."""
    for wheel in map(Path, wheels):
        platform = platform_of(wheel.stem.rpartition("-")[2])
        with zipfile.ZipFile(wheel) as file:
            found = {
                Path(name).name: file.read(name)
                for name in file.namelist()
                if name.endswith(platform.system.ending)
            }
        if len(found) != len(FORMS) * len(sets_of(platform)):
            raise SystemExit(f"{wheel.name} has {len(found)} libraries")
        shown = sum(check(name, data, platform) for name, data in found.items())
        print(f"{wheel.name}: {len(found)} libraries show {shown} functions")
    for machine in _MACHINES:
        print(f"clang-cl for {machine}: {compiled(Platform('win32', machine))} files compiled, none linked")


def check(name: str, data: bytes, platform: Platform) -> int:
    """Check a library; how many functions it shows."""
    parsed = lief.parse(list(data))
    header = parsed.header
    kind = next(
        str(getattr(header, one)) for one in ("machine_type", "cpu_type", "machine") if hasattr(header, one)
    )
    if not whole(name, data) or kind not in _MACHINES[platform.machine]:
        raise SystemExit(f"{name} is for {kind}")
    shown = {one.name.removeprefix("_") for one in parsed.exported_functions}
    wanted = set(_CALLED.findall(text_of(FOLDER / f"{name.partition('-')[0]}.c")))
    if absent := wanted - shown:
        raise SystemExit(f"{name} does not show {sorted(absent)}")
    return len(wanted)


def compiled(platform: Platform) -> int:
    """Compile the sources for Microsoft's libraries, for each form and set; how many there were."""
    own = Path(ziglang.__file__).parent
    clang = [str(own / "zig"), "clang", "--driver-mode=cl", *platform.options("SET", ["clang-cl"])]
    clang += [f"--target={platform.machine}-pc-windows-msvc", *FLAGS, "-c"]
    clang += ["-Wno-unused-command-line-argument", "-nostdlibinc"]
    made = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("malloc", "math", "stdlib", "string", "windows"):
            Path(folder, f"{name}.h").write_text(f'#include "{Path(__file__).parent / "microsoft.h"}"\n')
        for limit in sets_of(platform):
            for source, flags in FORMS:
                options = [word.replace("SET", limit.march) for word in clang]
                places = ["-isystem", folder, "-isystem", str(own / "lib" / "include")]
                subprocess.run(
                    [*options, *flags, *places, str(FOLDER / source), "-o", f"{folder}/made"], check=True
                )
                made += 1
    return made


if __name__ == "__main__":
    main(sys.argv[1:])

"""Read the libraries of wheels for other systems: python lab/tools/elsewhere.py WHEEL ...; needs lief.

Each must be of its wheel's processor, one for each form and set, and show the functions that Python calls.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import lief

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from outpace.native.packaged import FOLDER, FORMS, sets_of, text_of, whole
from outpace.native.systems import Platform, platform_of

_CALLED = re.compile(r"^(?!static|typedef)\w[\w *]*?\b(\w+)\([^;{]*\{", re.MULTILINE)
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


if __name__ == "__main__":
    main(sys.argv[1:])

"""Wheels: the pure one, and with OUTPACE_LIBRARIES=1 that of the platform, with the functions in C compiled.

OUTPACE_LIBRARIES may also be the platform of another wheel, such as win_amd64, which zig compiles anywhere
(CC="python -m ziglang cc"). The libraries have no interface of Python's, so one wheel is for all versions.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Libraries(BuildHookInterface[Any]):
    """Compiles the libraries, and names the platform in the wheel's tag."""

    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        asked = os.environ.get("OUTPACE_LIBRARIES", "")
        if version == "editable" or asked in ("", "0"):
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from outpace.native.packaged import FOLDER, LIBRARIES, make_libraries
        from outpace.native.systems import platform_of

        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_") if asked == "1" else asked
        self._folder = tempfile.mkdtemp(prefix="outpace-libraries-")
        below = Path("outpace/native") / LIBRARIES.relative_to(FOLDER)
        for path in make_libraries(Path(self._folder), os.environ.get("CC") or "cc", platform_of(tag)):
            build_data["force_include"][str(path)] = (below / path.name).as_posix()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)

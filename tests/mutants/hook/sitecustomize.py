"""Compiles some modules from other texts, in this process and those it starts.

``MUTANT_TEXTS`` has the file of each module's text, in JSON. The source on disk stays as it is, and no
bytecode is read or written for these modules.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

TEXTS: dict[str, str] = json.loads(os.environ["MUTANT_TEXTS"])


class Mutated(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        text = Path(TEXTS[fullname]).read_text("utf-8")
        # For tracebacks, and for Triton, which reads the source of its kernels.
        linecache.cache[self.path] = (len(text), None, text.splitlines(keepends=True), self.path)
        return compile(text, self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in TEXTS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = Mutated(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())

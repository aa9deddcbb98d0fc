"""Compiles one module from another text, in this process and those it starts; ``test_mutants`` sets which.

The source on disk stays as it is, and no bytecode is read or written for the module.
"""

from __future__ import annotations

import linecache
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

MODULE, TEXT = os.environ["MUTANT_MODULE"], Path(os.environ["MUTANT_TEXT"])


class Mutated(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        text = TEXT.read_text("utf-8")
        # For tracebacks, and for Triton, which reads the source of its kernels.
        linecache.cache[self.path] = (len(text), None, text.splitlines(keepends=True), self.path)
        return compile(text, self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = Mutated(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())

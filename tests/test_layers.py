"""The import rule of the package, read from the source with `ast`: imports go downwards only.

Imports under `if TYPE_CHECKING` and inside functions count too: they are knowledge of another module all
the same. The last tests in this file feed the checker small wrong sources, so that it is known to catch
each kind of mistake.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "outpace"

# Bottom to top. A unit is a module or a package directly under outpace.
LAYERS: list[set[str]] = [
    {"core"},
    {"tree", "sampling", "stopping", "cache", "index", "spec", "costs", "acceptance", "hardware", "jsonl"},
    {"sequence"},
    {"verify", "targets", "governor", "observer"},
    {"drafting"},
    {"drafters", "request", "drift"},
    {"parts"},
    {"engine", "profile"},
    {"hf", "serve", "bench", "train", "ralm", "testing"},
    {"console"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}

# What the units in the middle may know, where the layers alone would allow more.
DRAFTERS_MAY_IMPORT = {"core", "tree", "sampling", "index", "sequence", "spec", "drafting"}
DRAFTERS_THAT_OWN_A_MODEL = {"draft_model", "cascade"}
# A drafter is handed the target, as its abstract class: these look at it.
CONTRACTS = {
    ("drafters.base", "targets.base"),
    ("drafters.blockwise", "targets.base"),
    ("drafters.combined", "targets.base"),
    ("drafters.dflash", "targets.base"),
    ("drafters.eagle", "targets.base"),
    ("drafters.early_exit", "targets.base"),
    ("drafters.early_exit", "targets.split"),
    ("drafters.hydra", "targets.base"),
    ("drafters.medusa", "targets.base"),
    ("drafters.parallel_tokens", "targets.base"),
    ("drafters.retrieval", "targets.base"),
    ("drafters.self_speculative", "targets.base"),
    ("drafters.spec_drafter", "targets.base"),
    ("drafters.suffix", "targets.base"),
    ("drafters.token_recycling", "targets.base"),
}
VERIFY_MAY_NOT_IMPORT = {"targets", "cache"}

# Names that outpace/__init__.py defines itself; anything else has a module of its own to import from.
ROOT_NAMES = {"__version__", "nano_path", "nano_draft_path", "nano_drafter_path"}

# Optional packages and the units that may import them at module level.
OPTIONAL: dict[str, set[str]] = {
    "matplotlib": {"bench"},
    "fastapi": {"serve"},
    "accelerate": {"train"},
    "datasets": {"train"},
    "ray": {"serve", "train"},
    "bm25s": {"ralm"},
    "faiss": {"ralm"},
    "gguf": set(),
    "optuna": {"bench", "train"},
    "peft": {"train"},
    "pydivsufsort": set(),
}

FUNCTION_LINES = 60
DRAFTER_LINES = 250


def check_imports(name: str, source: str) -> list[str]:
    """What is wrong with the imports of module `name`, e.g. "engine" or "drafters.lookahead"."""
    if name == "__init__":
        return []
    found = []
    for line, target in own_imports(name, ast.parse(source)):
        reason = why_not(name, target)
        if reason:
            found.append(f"{name}:{line}: imports outpace.{target}: {reason}")
    return found


def own_imports(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every import from outpace, as (line, dotted name below outpace)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "outpace":
                    yield node.lineno, alias.name.removeprefix("outpace").removeprefix(".")
        elif isinstance(node, ast.ImportFrom):
            base = absolute(name, node)
            if base.split(".")[0] != "outpace":
                continue
            base = base.removeprefix("outpace").removeprefix(".")
            for alias in node.names:
                # "from outpace import tree" and "from outpace.drafters import base" name modules
                yield node.lineno, f"{base}.{alias.name}".removeprefix(".")


def absolute(name: str, node: ast.ImportFrom) -> str:
    """The module a "from" import names, relative dots resolved."""
    if not node.level:
        return node.module or ""
    parts = ["outpace", *name.split(".")]
    return ".".join([*parts[: len(parts) - node.level], *([node.module] if node.module else [])])


def why_not(importer: str, target: str) -> str:
    """The reason why module `importer` may not import `target`, or the empty string."""
    unit, _, rest = importer.partition(".")
    other, _, inner = target.partition(".")
    if unit not in HEIGHT:
        return f"{unit!r} has no layer yet: give it one in tests/test_layers.py"
    if unit == "cli" or target in ROOT_NAMES:
        return ""
    if other not in HEIGHT:
        return "import the name from the module where it lives, not from the package"
    if other == unit:
        return same_unit(unit, rest, inner)
    if HEIGHT[other] == HEIGHT[unit]:
        return "modules of one layer do not import each other"
    if HEIGHT[other] > HEIGHT[unit]:
        return "imports go downwards only"
    if unit == "verify" and other in VERIFY_MAY_NOT_IMPORT:
        return "verify knows no model and no cache"
    if unit == "drafters" and other not in DRAFTERS_MAY_IMPORT:
        if other not in {"targets", "cache"}:
            return "a drafter does not need it"
        knows_contract = (importer, f"{other}.{inner.split('.')[0]}") in CONTRACTS
        if rest not in DRAFTERS_THAT_OWN_A_MODEL and not knows_contract:
            return "only a drafter that owns a model knows targets"
    return ""


def same_unit(unit: str, importer: str, target: str) -> str:
    """Files of one package may import each other, except drafters, which know only their base."""
    if unit != "drafters" or importer == "__init__" or target.split(".")[0] == "base":
        return ""
    return "drafters do not import each other, only base"


def check_optional(name: str, source: str) -> list[str]:
    """Optional packages imported at module level outside the package that owns them."""
    found = []
    for node in at_import_time(ast.parse(source).body):
        if isinstance(node, ast.Import):
            roots = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            roots = [(node.module or "").split(".")[0]]
        else:
            continue
        for root in roots:
            if root in OPTIONAL and name.split(".")[0] not in OPTIONAL[root]:
                found.append(f"{name}:{node.lineno}: imports the optional {root} at module level")
    return found


def at_import_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported: not functions, not `if TYPE_CHECKING`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from at_import_time(node.orelse)
            continue
        yield node
        yield from at_import_time(
            [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        )
        for handler in getattr(node, "handlers", []):
            yield from at_import_time(handler.body)


def check_size(name: str, source: str) -> list[str]:
    """Functions and drafter files over the size budget. A docstring costs nothing."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = length(node) - (length(node.body[0]) if ast.get_docstring(node) else 0)
            if lines > FUNCTION_LINES:
                found.append(f"{name}:{node.lineno}: {node.name} has {lines} lines, over {FUNCTION_LINES}")
    lines = len(source.splitlines())
    if name.split(".")[0] == "drafters" and lines > DRAFTER_LINES:
        found.append(f"{name}: {lines} lines, over {DRAFTER_LINES}")
    return found


def length(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def modules() -> dict[str, str]:
    """Every module of the package by its dotted name below outpace, with its source."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file.read_text("utf-8") for file in files
    }


MODULES = modules()


def test_the_package_was_found() -> None:
    assert {
        "__init__",
        "core",
        "engine",
        "verify.match",
        "cli.__init__",
        "drafters.lookahead",
        "targets.causal",
    } <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downwards(name: str) -> None:
    assert check_imports(name, MODULES[name]) == []


@pytest.mark.parametrize("name", MODULES)
def test_optional_packages_stay_inside_their_package(name: str) -> None:
    assert check_optional(name, MODULES[name]) == []


@pytest.mark.parametrize("name", MODULES)
def test_size_budget(name: str) -> None:
    assert check_size(name, MODULES[name]) == []


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("core", "from outpace.tree import chain", "downwards"),
        ("core", "from .tree import chain", "downwards"),
        ("core", "import outpace.tree", "downwards"),
        ("core", "from outpace import tree", "downwards"),
        ("core", "from . import tree", "downwards"),
        ("core", "def f():\n    from outpace.engine import Engine", "downwards"),
        ("core", "if TYPE_CHECKING:\n    from outpace.engine import Engine", "downwards"),
        ("core", "try:\n    import outpace.engine\nexcept ImportError:\n    pass", "downwards"),
        ("index.pool", "from ..sequence import Sequence", "downwards"),
        ("index.__init__", "from ..engine import Engine", "downwards"),
        ("targets.causal", "from ..drafters.base import Drafter", "downwards"),
        ("engine", "from outpace.hf import decode", "downwards"),
        ("engine", "from outpace.cli import main", "downwards"),
        ("tree", "from outpace.sampling import draw", "one layer"),
        ("targets.causal", "from outpace.verify import match", "one layer"),
        ("hf", "from outpace.testing import ToyTarget", "one layer"),
        ("verify", "from outpace.targets import Target", "one layer"),
        ("verify", "from outpace.cache import KVCache", "no cache"),
        ("drafters.lookahead", "from outpace.engine import Engine", "downwards"),
        ("drafters.lookahead", "from outpace.verify import match", "does not need"),
        ("drafters.lookahead", "from outpace.governor import Governor", "does not need"),
        ("drafters.lookahead", "from outpace.targets import Target", "owns a model"),
        ("drafters.lookahead", "from ..targets.base import Target", "owns a model"),
        ("drafters.base", "from outpace.targets import Target", "owns a model"),
        ("drafters.base", "from outpace.targets.causal import Causal", "owns a model"),
        ("drafters.lookahead", "from .jacobi import Jacobi", "each other"),
        ("drafters.lookahead", "from . import jacobi", "each other"),
        ("drafters.lookahead", "from outpace.drafters import Jacobi", "each other"),
        ("drafters.lookahead", "import outpace.drafters.jacobi", "each other"),
        ("drafters.base", "from .none import NoDraft", "each other"),
        ("drafters.draft_model", "from .none import NoDraft", "each other"),
        ("drafters.__init__", "from outpace.engine import Engine", "downwards"),
        ("engine", "from outpace import SamplingParams", "where it lives"),
        ("engine", "import outpace", "where it lives"),
        ("newcomer", "from outpace.core import Draft", "no layer"),
    ],
)
def test_checker_catches_a_wrong_import(name: str, source: str, reason: str) -> None:
    (found,) = check_imports(name, source)
    assert reason in found


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("__init__", "from .engine import Engine"),
        ("cli", "import outpace\nfrom outpace import Engine\nfrom outpace.hf import decode"),
        ("hf", "from outpace import nano_path, __version__\nfrom outpace.engine import Engine"),
        ("testing", "from outpace.engine import Engine\nfrom outpace.verify import match"),
        (
            "engine",
            "import torch, outpacer\nfrom outpace import tree\nfrom outpace.drafters import load_drafter",
        ),
        ("targets.__init__", "from .base import Target\nfrom .causal import Causal"),
        (
            "targets.causal",
            "from .base import Target\nfrom ..cache import KVCache\nfrom outpace.core import Draft",
        ),
        ("drafters.__init__", "from .jacobi import Jacobi\nfrom .base import Drafter"),
        ("drafters.jacobi", "from .base import Drafter\nfrom . import base\nfrom ..sampling import draw"),
        ("drafters.base", "from outpace.targets.base import TargetModel"),
        ("drafters.draft_model", "from outpace.targets import Target\nfrom .base import Drafter"),
        ("verify", "from outpace.sequence import StepDraw\nfrom .tree import children"),
        ("train.online", "from .loop import fit\nfrom ..engine import Engine"),
    ],
)
def test_checker_allows_a_right_import(name: str, source: str) -> None:
    assert check_imports(name, source) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("engine", "import matplotlib.pyplot as plt"),
        ("cli", "from fastapi import FastAPI"),
        ("bench.run", "import ray"),
        ("index.dense", "try:\n    import faiss\nexcept ImportError:\n    faiss = None"),
        ("index.dense", "try:\n    import re\nexcept ImportError:\n    import faiss"),
        ("engine", "if True:\n    import optuna"),
        ("engine", "class A:\n    import peft"),
    ],
)
def test_checker_catches_an_optional_import(name: str, source: str) -> None:
    assert len(check_optional(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("bench.report", "import matplotlib.pyplot as plt"),
        ("cli", "def serve():\n    import fastapi"),
        ("engine", "if TYPE_CHECKING:\n    import peft"),
        ("engine", "from .faiss import x"),
    ],
)
def test_checker_allows_an_optional_import(name: str, source: str) -> None:
    assert check_optional(name, source) == []


def test_checker_catches_a_long_function() -> None:
    body = "".join(f"    x{i} = {i}\n" for i in range(FUNCTION_LINES - 1))
    doc = '    """One.\n\n    Three.\n    """\n'
    assert check_size("engine", f"def f():\n{doc}{body}") == []
    assert check_size("engine", f"def f():\n{doc}{body}    y = 0\n") == ["engine:1: f has 61 lines, over 60"]
    nested = "class A:\n    async def f(self):\n" + "        pass\n" * FUNCTION_LINES
    assert len(check_size("engine", nested)) == 1


def test_checker_catches_a_long_drafter() -> None:
    source = "x = 0\n" * DRAFTER_LINES
    assert check_size("drafters.lookahead", source) == []
    assert check_size("drafters.lookahead", source + "x = 0\n") == ["drafters.lookahead: 251 lines, over 250"]
    assert check_size("engine", source + "x = 0\n") == []

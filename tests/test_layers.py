"""The import rule of the package, read from the source with `ast`: imports go downwards only.

Imports under `if TYPE_CHECKING` and inside functions count too: they are knowledge of another module all
the same. The last tests in this file feed the checker small wrong sources, so that it is known to catch
each kind of mistake.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from outpace.drafters import DRAFTERS

PACKAGE = Path(__file__).parent.parent / "src" / "outpace"
LAB = PACKAGE.parent.parent / "lab"

# Bottom to top. A unit is a module or a package directly under outpace.
LAYERS: list[set[str]] = [
    {"_version"},
    {"core"},
    {"plugins", "spec_text"},
    {"embedded", "tree", "text", "spec", "files", "hub"},
    {"catalogue"},
    {"native", "reading", "names", "transfer"},
    {"cache", "draws"},
    {"sequence", "grammars"},
    {"verify", "targets", "policy"},
    {"learned"},
    {"drafters"},
    {"engine"},
    {"loading"},
    {"hf", "bench", "testing"},
    {"serve"},
    {"cli"},
    {"__main__"},
]
# The rooms of targets, bottom to top.
ROOMS: list[set[str]] = [
    {"hardware", "kernel", "plan", "rows"},
    {"batch", "capabilities"},
    {"base"},
    {"around"},
    {"inputs", "ranks", "ties"},
    {"cpu"},
    {"gpu", "native"},
    {"step"},
    {"stock", "llamacpp"},
    {"gguf"},
    {"__init__"},
    {"weights"},
]
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}

# What drafters may know, where the layers alone would allow more. Of targets the contract, and what a
# drafter with a model of its own is read by.
DRAFTERS_MAY_IMPORT = {
    "core", "plugins", "tree", "draws", "native", "sequence", "spec", "text", "cache",
    "embedded", "files", "learned", "targets", "transfer",
}  # fmt: skip
VERIFY_MAY_NOT_IMPORT = {"targets", "cache"}


# Optional packages and the units that may import them at module level.
OPTIONAL: dict[str, set[str]] = {
    "jinja2": set(),
    "matplotlib": set(),
    "fastapi": {"serve"},
    "llguidance": {"grammars", "serve"},
    "prometheus_client": {"serve"},
    "pydantic": {"serve"},
    "sse_starlette": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "accelerate": set(),
    "bm25s": set(),
    "datasets": set(),
    "faiss": set(),
    "optuna": set(),
    "ray": {"serve"},
    "gguf": set(),
    "llama_cpp": set(),
    "opentelemetry": set(),
    "peft": set(),
    "triton": {"draws", "native", "targets"},
}

FUNCTION_LINES = 60

# The families of drafters, and the files in them (and beside them) that define a drafter.
FAMILIES = {path.name for path in (PACKAGE / "drafters").iterdir() if path.is_dir()} - {
    "support",
    "__pycache__",
}
DRAFTER_FILES = {cls.__module__.removeprefix("outpace.drafters.") for cls in DRAFTERS.values()}


def check_imports(name: str, source: str) -> list[str]:
    """List the invalid imports of module `name`, e.g. "engine" or "drafters.lookahead"."""
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
    if unit == "cli":
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
        return "a drafter does not need it"
    return ""


def same_unit(unit: str, importer: str, target: str) -> str:
    """The reason why one file of a package may not import another: only targets and drafters have any.

    A room of targets imports from those below it. A drafter imports from its own family and from ``support``
    what is not a drafter.
    """
    if unit == "targets":
        return between_rooms(importer.partition(".")[0], target.partition(".")[0])
    if unit != "drafters" or importer == "__init__":
        return ""
    module = target if target in DRAFTER_FILES else target.rpartition(".")[0]
    if module in DRAFTER_FILES and module != importer:
        return "drafters do not import each other"
    if target.split(".")[0] not in {*FAMILIES, "base", "support"}:
        return "drafters do not import each other"
    family = importer.split(".")[0]
    if target.split(".")[0] not in {"base", "support", family}:
        return "a family of drafters keeps its support to itself; what several need goes to drafters.support"
    return ""


def between_rooms(importer: str, target: str) -> str:
    """The reason why one room of targets may not import another; a name that is no room is its door's."""
    if not {f"targets.{target}", f"targets.{target}.__init__"} & set(MODULES):
        target = "__init__"
    for room in (importer, target):
        if room not in FLOOR:
            return f"{room!r} has no floor in targets yet: give it one in tests/test_layers.py"
    if importer != target and FLOOR[importer] <= FLOOR[target]:
        return "a room of targets imports from the rooms below it"
    return ""


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


# Where steps run. Self-tests and what loads weights may wait for a device.
STEPS = ("engine", "drafters", "draws", "cache", "verify", "targets")
NOT_STEPS = ("targets.step", "targets.weights")
MAKES = {"tensor", "as_tensor", "asarray", "scalar_tensor"}


def check_uploads(name: str, source: str) -> list[str]:
    """Calls in a module of steps that bring data to a device other than by ``transfer.upload``."""
    if not name.startswith(STEPS) or name.startswith(NOT_STEPS):
        return []
    return [
        f"{name}:{node.lineno} {ast.unparse(node)}: use transfer.upload, which does not wait for CUDA"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and uploads(node)
    ]


def uploads(call: ast.Call) -> bool:
    given = {keyword.arg for keyword in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    moved = call.func.value if isinstance(call.func, ast.Attribute) and name == "to" else None
    made = isinstance(moved, ast.Call) and getattr(moved.func, "attr", "") in {*MAKES, "from_numpy"}
    return made or "non_blocking" in given or (name in MAKES and "device" in given) or name == "pin_memory"


def check_size(name: str, source: str) -> list[str]:
    """Functions over the size budget. A docstring costs nothing."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = length(node) - (length(node.body[0]) if ast.get_docstring(node) else 0)
            if lines > FUNCTION_LINES:
                found.append(f"{name}:{node.lineno}: {node.name} has {lines} lines, over {FUNCTION_LINES}")
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


def offences(check: Callable[[str, str], list[str]]) -> list[str]:
    return [found for name, source in MODULES.items() for found in check(name, source)]


def test_the_package_was_found() -> None:
    assert {
        "__init__",
        "core.errors",
        "engine.engine",
        "verify.match",
        "cli.__init__",
        "drafters.parallel.lookahead",
        "targets.stock.causal",
    } <= set(MODULES)


def test_imports_go_downwards() -> None:
    assert offences(check_imports) == []


def test_optional_packages_stay_inside_their_package() -> None:
    assert offences(check_optional) == []


def test_only_targets_guess_at_a_targets_model() -> None:
    guess = re.compile(r"(get|has)attr\([^)]*, \"model\"")
    found = [name for name in MODULES if not name.startswith("targets") and guess.search(MODULES[name])]
    assert not found
    assert guess.search('getattr(engine.target, "model", None)')


def laboratory(files: dict[str, str]) -> list[str]:
    """The lines of files that name the laboratory's package, which finds the core and not the reverse."""
    name = "outpace" + "_lab"
    return [
        f"{file}:{number}: {line.strip()}"
        for file, text in files.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if name in line
    ]


def test_nothing_in_the_core_names_the_laboratorys_package() -> None:
    texts = {}
    for file in sorted(
        path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ):
        with contextlib.suppress(UnicodeDecodeError):  # weights of models
            texts[str(file.relative_to(PACKAGE))] = file.read_text("utf-8")
    assert laboratory(texts) == []
    assert laboratory({"a.py": "\n# see outpace_lab.train"}) == ["a.py:2: # see outpace_lab.train"]


def test_outpaces_tests_do_not_import_the_laboratory() -> None:
    scripts = {file.stem for file in (LAB / "tools").rglob("*.py")}
    assert "exactness" in scripts
    for file in (PACKAGE.parents[1] / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names}
            assert not roots & {"outpace_lab", *scripts}, file


def test_data_go_to_a_device_by_one_way() -> None:
    assert not offences(check_uploads)


def classes(sources: Iterable[str]) -> list[str]:
    """The names of all classes."""
    return [
        node.name
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    ]


def test_a_name_of_a_class_has_one_meaning() -> None:
    found = Counter(classes(file.read_text("utf-8") for file in PACKAGE.rglob("*.py")))
    assert len(found) > 300
    assert [name for name, count in found.items() if count > 1] == []


def test_classes_of_one_name_are_found() -> None:
    assert classes(["class A:\n    class B: ...\n", "def f():\n    class A: ...\n"]) == ["A", "B", "A"]


def test_size_budget() -> None:
    assert offences(check_size) == []


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
        ("policy.costs", "from ..engine import Engine", "downwards"),
        ("learned.__init__", "from ..drafters import Drafter", "downwards"),
        ("targets.stock.causal", "from ...drafters.base import Drafter", "downwards"),
        ("engine", "from outpace.hf import decode", "downwards"),
        ("engine", "from outpace.cli import main", "downwards"),
        ("tree", "from outpace.spec import parse", "one layer"),
        ("targets.stock.causal", "from outpace.verify import match", "one layer"),
        ("hf", "from outpace.testing import ToyTarget", "one layer"),
        ("verify", "from outpace.targets import Target", "one layer"),
        ("verify", "from outpace.cache import KVCache", "no cache"),
        ("drafters.lookahead", "from outpace.engine import Engine", "downwards"),
        ("drafters.lookahead", "from outpace.verify import match", "does not need"),
        ("drafters.parallel.lookahead", "from outpace.verify import match", "does not need"),
        ("drafters.lookahead", "from outpace.policy.governor import Governor", "does not need"),
        ("drafters.parallel.lookahead", "from .jacobi import Jacobi", "each other"),
        ("drafters.parallel.lookahead", "from . import jacobi", "each other"),
        ("drafters.parallel.lookahead", "from ..models.runner import Runner", "keeps its support"),
        ("drafters.support.growth", "from ..heads.heads import Heads", "keeps its support"),
        ("drafters.lookahead", "from outpace.drafters import Jacobi", "each other"),
        ("drafters.parallel.lookahead", "import outpace.drafters.parallel.jacobi", "each other"),
        ("drafters.base", "from .none import NoDraft", "each other"),
        ("drafters.draft_model", "from .none import NoDraft", "each other"),
        ("drafters.__init__", "from outpace.engine import Engine", "downwards"),
        ("engine", "from outpace import SamplingParams", "where it lives"),
        ("engine", "import outpace", "where it lives"),
        ("targets.inputs.masks", "from outpace.targets.native.runner import NativeRunner", "rooms below"),
        ("targets.base", "from outpace.targets.around import WrappedTarget", "rooms below"),
        ("targets.newcomer.steps", "from outpace.targets.base import Rows", "no floor"),
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
        ("hf", "from outpace.embedded import nano_path\nfrom outpace.engine import Engine"),
        ("testing", "from outpace.engine import Engine\nfrom outpace.verify import match"),
        (
            "engine",
            "import torch, outpacer\nfrom outpace import tree\nfrom outpace.drafters import load_drafter",
        ),
        ("targets.__init__", "from .base import Target\nfrom .stock.causal import Causal"),
        (
            "targets.stock.causal",
            "from ..base import Target\nfrom ...cache import KVCache\nfrom outpace.core import Draft",
        ),
        ("drafters.__init__", "from .jacobi import Jacobi\nfrom .base import Drafter"),
        (
            "drafters.parallel.jacobi",
            "from ..base import Drafter\nfrom .. import base",
        ),
        (
            "drafters.parallel.lookahead",
            "from .ngram_pool import Pool\nfrom ..support import draws",
        ),
        ("drafters.base", "from outpace.targets.base import TargetModel"),
        ("drafters.models.draft_model", "from outpace.targets import Target\nfrom ..base import Drafter"),
        ("verify", "from outpace.sequence import StepDraw\nfrom .tree import children"),
        ("bench.run", "from .rows import Row\nfrom ..engine import Engine"),
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
        ("bench.run", "try:\n    import faiss\nexcept ImportError:\n    faiss = None"),
        ("bench.run", "try:\n    import re\nexcept ImportError:\n    import faiss"),
        ("engine", "if True:\n    import optuna"),
        ("engine", "class A:\n    import peft"),
    ],
)
def test_checker_catches_an_optional_import(name: str, source: str) -> None:
    assert len(check_optional(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("serve.routes", "import fastapi"),
        ("cli", "def serve():\n    import fastapi"),
        ("engine", "if TYPE_CHECKING:\n    import peft"),
        ("engine", "from .faiss import x"),
    ],
)
def test_checker_allows_an_optional_import(name: str, source: str) -> None:
    assert check_optional(name, source) == []


@pytest.mark.parametrize(
    "call",
    [
        "torch.tensor([1], device=device)",
        "rows.to(device, non_blocking=True)",
        "torch.from_numpy(rows).to(device)",
        "torch.tensor(ids).to(device)",
        "rows.pin_memory()",
    ],
)
def test_checker_catches_an_upload(call: str) -> None:
    assert check_uploads("engine.step", call) and not check_uploads("targets.step.record", call)


def test_checker_catches_a_long_function() -> None:
    body = "".join(f"    x{i} = {i}\n" for i in range(FUNCTION_LINES - 1))
    doc = '    """One.\n\n    Three.\n    """\n'
    assert check_size("engine", f"def f():\n{doc}{body}") == []
    assert check_size("engine", f"def f():\n{doc}{body}    y = 0\n") == ["engine:1: f has 61 lines, over 60"]
    nested = "class A:\n    async def f(self):\n" + "        pass\n" * FUNCTION_LINES
    assert len(check_size("engine", nested)) == 1


@pytest.mark.parametrize("source", [PACKAGE, LAB / "src"], ids=["core", "lab"])
def test_an_environment_variable_is_named_once(source: Path) -> None:
    """So that no message spells it in another way."""
    found = Counter(name for path in source.rglob("*.py") for name in variables_of(path.read_text("utf-8")))
    assert found and {name for name, count in found.items() if count > 1} == set()


def variables_of(source: str) -> Iterator[str]:
    """The environment variables of ours that strings name, docstrings apart."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield from re.findall("OUTPACE_?[A-Z]+(?:_[A-Z]+)*", node.value)


def test_every_naming_of_a_variable_is_found() -> None:
    source = '"""OUTPACE_DOC"""\nA = "OUTPACE_A"\nf(f"set {A} or OUTPACEB", "OUTPACE_A_B of OUTPACE_")'
    assert sorted(variables_of(source)) == ["OUTPACEB", "OUTPACE_A", "OUTPACE_A_B"]

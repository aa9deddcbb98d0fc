"""What the laboratory may import of outpace, and that outpace's drafters know nothing of the laboratory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import outpace
import outpace_lab

LAB, CORE = (Path(str(package.__file__)).parent for package in (outpace_lab, outpace))

# Outpace's interface for the laboratory: a change of one of these changes both distributions.
INTERFACE = {
    "outpace._version", "outpace.cache", "outpace.core", "outpace.embedded", "outpace.files",
    "outpace.loading", "outpace.loading.loaded", "outpace.loading.placement", "outpace.loading.weights",
    "outpace.plugins", "outpace.sequence", "outpace.spec", "outpace.spec_text", "outpace.tree",
    "outpace.drafters",
    "outpace.drafters.base", "outpace.drafters.combined.parts",
    "outpace.drafters.models.draft_model", "outpace.drafters.support.draws",
    "outpace.drafters.support.growth", "outpace.drafters.support.layer_cache",
    "outpace.drafters.support.best_first", "outpace.drafters.support.memories",
    "outpace.drafters.support.pieces", "outpace.drafters.support.runner", "outpace.drafters.support.shapes",
    "outpace.drafters.support.vocabulary", "outpace.drafters.support.within",
    "outpace.draws.logits", "outpace.draws.noise",
    "outpace.draws.sampling",
    "outpace.engine.engine", "outpace.engine.parts", "outpace.engine.profile", "outpace.engine.request",
    "outpace.targets", "outpace.targets.around", "outpace.targets.base", "outpace.targets.batch",
    "outpace.targets.inputs.config", "outpace.targets.inputs.surgery", "outpace.targets.step.agreement",
    "outpace.names", "outpace.targets.rows",
    "outpace.targets.stock.causal", "outpace.targets.stock.seq2seq", "outpace.targets.ties",
    "outpace.targets.weights.adapters", "outpace.targets.weights.pretrained", "outpace.testing.gguf",
    "outpace.verify.base",
    "outpace.verify.match", "outpace.verify.rejection",
    # Modules that draft, from which those that learn derive.
    "outpace.drafters.support.blocks", "outpace.drafters.blocks.dflash_module",
    "outpace.drafters.eagle.eagle_module", "outpace.drafters.heads.heads", "outpace.drafters.heads.hydra",
    "outpace.drafters.heads.medusa", "outpace.drafters.mtp.mtp_checkpoint",
    "outpace.drafters.mtp.mtp_module", "outpace.targets.inputs.forward", "outpace.learned.frequent",
    "outpace.learned.folder", "outpace.learned.layers",
    "outpace.learned.learned", "outpace.learned.published", "outpace.learned.vocabulary",
}  # fmt: skip
# Benchmarks and commands are extended as a whole.
EXTENDED = {"outpace.bench", "outpace.cli"}


def imported(source: str) -> Iterator[str]:
    """The modules of outpace that a source imports, wherever it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "outpace")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outpace":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else str(node.module)


def is_module(name: str) -> bool:
    place = CORE.parent / name.replace(".", "/")
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def beyond(name: str, source: str) -> list[str]:
    """A source's imports that are not in the interface."""
    return [
        f"{name} imports {module}"
        for module in imported(source)
        if module not in INTERFACE and ".".join(module.split(".")[:2]) not in EXTENDED
    ]


def sources(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text("utf-8") for file in sorted(folder.rglob("*.py"))}


def test_the_laboratory_imports_the_interface_only() -> None:
    assert [found for name, source in sources(LAB).items() for found in beyond(name, source)] == []


def test_the_interface_is_what_the_laboratory_imports() -> None:
    assert {module for source in sources(LAB).values() for module in imported(source)} >= INTERFACE


def test_drafters_and_their_modules_know_nothing_of_the_laboratory() -> None:
    rooms = {
        name: source for name, source in sources(CORE).items() if name.startswith(("drafters/", "learned/"))
    }
    assert len(rooms) > 40
    assert [name for name, source in rooms.items() if "outpace_lab" in source] == []


def test_an_import_of_anything_else_is_found() -> None:
    for source in ("from outpace.targets import inputs", "def f():\n    import outpace.policy.governor"):
        assert beyond("mine", source), source
    assert not beyond("mine", "from outpace.core import Draft\nfrom outpace.bench.rows import Row")

"""Suites of prompts by name: those in the package, those of other packages, and a user's file.

``builtin`` has 60 prompts written for outpace, in Spec-Bench's six categories (Xia et al. 2024, arXiv
2401.07851) and code: two-turn conversations, translation, summarisation, questions, mathematics,
retrieval-augmented answers. ``rewriting`` and ``retrieval`` are tasks whose outputs repeat a text of the
prompt: correcting spelling errors in passages, and questions that a document answers verbatim. They use the
formats that the embedded models were trained on, but other subjects. Other packages register theirs in the
group ``outpace.suites``, as functions ``load(data: Path | None) -> Suite``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from outpace.bench.items import Suite, read_items
from outpace.core import OutpaceError
from outpace.names import COPYING, FILE, SUITES, check_suite
from outpace.plugins import installed, load_object

_FOLDER = Path(__file__).parent / "prompts"


def split_names(names: str) -> list[str]:
    """Names joined by commas.

    Raises:
        OutpaceError: a suite is named twice.
    """
    found = [name.strip() for name in names.split(",")]
    if len(set(found)) < len(found):
        raise OutpaceError(f"--suite has a suite twice in {names!r}")
    return found


def load_together(names: str, data: Path | None = None) -> Suite:
    """Several suites, their names joined by commas, as one, with their prompts in turn.

    Raises:
        OutpaceError: as ``load_suite``, or a suite is named twice.
    """
    suites = [load_suite(name, data) for name in split_names(names)]
    if len(suites) == 1:
        return suites[0]
    named = [[replace(item, id=f"{suite.name}/{item.id}") for item in suite.items] for suite in suites]
    return Suite(
        ",".join(suite.name for suite in suites),
        tuple(item for turn in zip_longest(*named) for item in turn if item is not None),
        ", ".join(suite.source for suite in suites),
        sum(suite.left_out for suite in suites),
    )


def load_suite(name: str, data: Path | None = None) -> Suite:
    """A suite's prompts, in their order.

    Args:
        name: one of ``SUITES``, the name of an installed package's, or ``file:PATH``.
        data: a folder that suites of other packages are read from; None for their usual place.

    Raises:
        OutpaceError: there is no such suite, or it cannot be found.
    """
    check_suite(name)
    if name.startswith(FILE):
        path = Path(name.removeprefix(FILE)).expanduser()
        return Suite(name, tuple(read_items(path, path.stem)), str(path))
    if name not in SUITES:
        return _of_package(name, data)
    items = read_items(_FOLDER / f"{name}.jsonl", name)
    if name in COPYING:  # outputs that repeat a text are as long as the text
        items = [replace(item, category=name, ends=True) for item in items]
    return Suite(name, tuple(items), "outpace")


def _of_package(name: str, data: Path | None) -> Suite:
    """A suite of another package."""
    found: Suite = load_object("suite", installed("suites")[name])(data)
    return found

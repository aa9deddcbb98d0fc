"""Suites of prompts by name: those in the package, public sets, and a user's file.

``builtin`` has 60 prompts written for outpace, in Spec-Bench's six categories (Xia et al. 2024, arXiv
2401.07851) and code: two-turn conversations, translation, summarisation, questions, mathematics,
retrieval-augmented answers. ``rewriting`` and ``retrieval`` are tasks whose outputs repeat a text of the
prompt: correcting spelling errors in passages, and questions that a document answers verbatim. They use the
formats that the embedded models were trained on, but other subjects.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outpace.bench.items import Item, Suite, read_items
from outpace.bench.public import PUBLIC, load_public
from outpace.core import OutpaceError

COPYING = ("rewriting", "retrieval")
PACKAGED = ("builtin", *COPYING)
SUITES = (*PACKAGED, *PUBLIC)
FILE = "file:"
_FOLDER = Path(__file__).parent / "prompts"


def load_suite(name: str, data: Path | None = None) -> Suite:
    """A suite's prompts, in their order.

    Args:
        name: one of ``SUITES``, or ``file:PATH``.
        data: a folder with public sets; without it they are read from the folder in OUTPACE_DATA or the hub.

    Raises:
        OutpaceError: there is no such suite, or it cannot be found.
    """
    if name.startswith(FILE):
        path = Path(name.removeprefix(FILE)).expanduser()
        if not path.is_file():
            raise OutpaceError(f"no such file: {path}; --suite {FILE}PATH takes a JSONL file of prompts")
        return Suite(name, tuple(read_items(path, path.stem)), str(path))
    if name in PUBLIC:
        return load_public(name, data)
    if name not in PACKAGED:
        raise OutpaceError(f"there is no suite {name!r}; there are: {', '.join(SUITES)}, {FILE}PATH")
    items = read_items(_FOLDER / f"{name}.jsonl", name)
    return Suite(name, tuple(_packaged(item, name) for item in items), "outpace")


def _packaged(item: Item, name: str) -> Item:
    """Set an item's category and end rule; outputs that repeat a text are as long as the text."""
    return replace(item, category=name, ends=True) if name in COPYING else item

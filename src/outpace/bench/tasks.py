"""The prompts that come with the package: tasks whose outputs repeat a text of the prompt.

``rewriting``: passages with spelling errors to be corrected. ``retrieval``: questions that a document
answers word for word. Both are written in the formats that the embedded models were trained on, on subjects
of their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from outpace.core import OutpaceError

TASKS = ("rewriting", "retrieval")
_FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Task:
    """One prompt of a task, and the texts that its output may repeat."""

    id: str
    prompt: str
    references: tuple[str, ...]


def load_tasks(name: str) -> list[Task]:
    """The prompts of ``rewriting`` or ``retrieval``, 20 each, in their order.

    Raises:
        OutpaceError: there is no such task.
    """
    if name not in TASKS:
        raise OutpaceError(f"there is no task {name!r}; there are: {', '.join(TASKS)}")
    lines = (_FOLDER / f"{name}.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Task(row["id"], row["prompt"], tuple(row["references"])) for row in rows]

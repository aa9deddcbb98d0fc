"""The prompts that come with the package."""

from __future__ import annotations

import re

import pytest
from outpace.bench.tasks import TASKS, load_tasks

from outpace.core import OutpaceError


@pytest.mark.parametrize("name", TASKS)
def test_twenty_prompts_with_their_references(name: str) -> None:
    tasks = load_tasks(name)
    assert len(tasks) == 20
    assert len({task.id for task in tasks}) == 20
    assert len({task.prompt for task in tasks}) == 20
    for task in tasks:
        (text,) = task.references
        pattern = {
            "rewriting": r"Text: (.*)\nCorrected:",
            "retrieval": r"Document: (.*)\nQuestion: [^\n]+\nAnswer:",
        }[name]
        found = re.fullmatch(pattern, task.prompt)
        assert found is not None
        assert found[1] == text


def test_an_unknown_task() -> None:
    with pytest.raises(OutpaceError, match="rewriting, retrieval"):
        load_tasks("poetry")

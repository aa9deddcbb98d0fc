"""``--help`` of the laboratory's commands, at the widths of terminals and of half of one."""

from __future__ import annotations

import pytest

from helps import Path, check_help, commands, helped

COMMANDS = commands("outpace_lab")


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_says_all_that_its_source_says(path: Path, columns: int) -> None:
    check_help(COMMANDS[path], helped(path, columns), columns)

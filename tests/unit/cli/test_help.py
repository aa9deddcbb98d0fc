"""``--help`` of every command, at the widths of terminals and of half of one."""

from __future__ import annotations

import pytest

from helps import Path, check_help, commands, helped
from outpace.cli.layout import RARE

COMMANDS = commands("outpace")


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_says_all_that_its_source_says(path: Path, columns: int) -> None:
    check_help(COMMANDS[path], helped(path, columns), columns)


def test_everyday_options_of_serve_come_first() -> None:
    shown = helped(("serve",))
    places = [
        shown.index(word) for word in ("--model", "--drafter", "--host", "--memory", RARE, "--stock", "-h,")
    ]
    assert places == sorted(places)
    assert len(shown.splitlines()) < 90

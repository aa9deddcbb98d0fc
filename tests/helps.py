"""The help of a command beside the strings that it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from outpace.cli.app import app

Path = tuple[str, ...]


def commands(package: str) -> dict[Path, Any]:
    """The commands that a package registers, by their words."""

    def below(command: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        yield path, command
        for name, one in getattr(command, "commands", {}).items():
            yield from below(one, (*path, name))

    def home(command: Any) -> str:
        return str(getattr(command.callback, "__module__", "outpace")).partition(".")[0]

    return {path: command for path, command in below(get_command(app), ()) if home(command) == package}


def check_help(command: Any, shown: str, columns: int) -> None:
    """Nothing of a command's help may be cut, left out or reordered, and no line is too long."""
    assert max(map(len, shown.splitlines())) <= columns
    words = [word.strip(",") for word in shown.split()]
    assert _joined(command.help or "") in _joined(shown)
    for own in command.params:
        if own.param_type_name == "option":
            assert {*own.opts, *own.secondary_opts} <= {*words}
            assert own.is_flag or (own.metavar and len(own.metavar) < 12 and own.metavar in words), own.name
        assert own.help and _joined(own.help) in _joined(shown), own.name
    for name, one in getattr(command, "commands", {}).items():
        assert name in words and _joined(one.help.partition("\n\n")[0]) in _joined(shown)


def _joined(text: str) -> str:
    return "".join(text.split())


def helped(path: Path, columns: int = 80) -> str:
    """What ``--help`` prints on a terminal of this width."""
    result = CliRunner().invoke(app, [*path, "--help"], terminal_width=columns)
    assert result.exit_code == 0
    return str(result.stdout)

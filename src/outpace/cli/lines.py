"""Messages that are typed in a terminal: line editing, history across runs, and messages of several lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from select import select

from outpace.cli import screen
from outpace.core import OutpaceError
from outpace.embedded import NoHome, cache_path

_LINES = 1000  # of history
_AT_ONCE = 0.02  # seconds within which the next line of a pasted text arrives


def read(interactive: bool) -> str | None:
    """A message, or None at the end of input.

    A line that ends in a backslash goes on in the next, and so does pasted text.
    """
    lines: list[str] = []
    try:
        while True:
            line = input((". " if lines else "> ") if interactive else "")
            lines.append(line.removesuffix("\\"))
            if not (line.endswith("\\") or (interactive and _more())):
                return "\n".join(lines)
    except EOFError:
        if lines:
            return "\n".join(lines)
        if interactive:
            screen.write("\n")
        return None
    except UnicodeDecodeError as error:
        raise OutpaceError(
            f"standard input is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def _more() -> bool:
    """True if another line follows at once, as in a pasted text."""
    with suppress(OSError, ValueError):  # no terminal that can be asked
        return bool(select([sys.stdin], [], [], _AT_ONCE)[0])
    return False


@contextmanager
def history() -> Iterator[None]:
    """Context of line editing, if the platform has readline; what is typed is found again in later runs."""
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_auto_history(True)
    readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text is one message
    try:
        file = cache_path() / "chat-history"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)  # other users cannot read it
        readline.read_history_file(file)
    except (NoHome, OSError):  # it is not kept
        yield
        return
    readline.set_history_length(_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            readline.write_history_file(file)

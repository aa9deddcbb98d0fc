"""Errors, and how they are told."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from outpace.core.remedies import Package, install


class OutpaceError(ValueError):
    """A mistake in the user's input; the message names the remedy."""


class UnsupportedModel(OutpaceError):
    """The model cannot serve as a target; the message names the reason."""


class ContextOverflow(OutpaceError):
    """A prompt is longer than the model's context."""


class RanksLost(OutpaceError):
    """One of the processes of a target has failed, which ended all of them and the engine.

    Attributes:
        here: whether this process was the first to notice.
    """

    here: bool = False


class NoTokenLeft(OutpaceError):
    """A row of logits leaves no token to choose."""


def out_of_memory(error: BaseException) -> bool:
    """True if an error means out of memory: Python's, a device's, or torch's on a CPU.

    The last is a plain RuntimeError that only its message distinguishes.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # compared by name, since torch may not be imported
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def load_extra(module: str, purpose: str, extra: str, package: Package = "outpace") -> Any:
    """Import a package that an extra of outpace or outpace-lab installs.

    Raises:
        OutpaceError: it cannot be imported; the message names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise OutpaceError(f"{purpose} needs {module}: {install(extra, package)}") from error


def near(name: str, names: Iterable[str]) -> str:
    """A question after an unknown name: whether the most similar of these was meant; empty if none is."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f" Did you mean {found[0]!r}?" if found else ""


def check_known(what: str, given: Iterable[str], known: Iterable[str], meant: Iterable[str] = ()) -> None:
    """Refuse an argument that there is not.

    Args:
        meant: names among which the similar one is sought; by default those known.

    Raises:
        OutpaceError: the message has the similar one.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            hint = near(name, meant or names) or f" There are: {', '.join(names)}"
            raise OutpaceError(f"{what} takes no argument {name!r}.{hint}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next if it ends in a colon, or the name of its type.

    The message of a missing entry is its name alone.
    """
    if isinstance(error, KeyError) and len(error.args) == 1:
        return f"there is no entry {str(error.args[0])[:80]!r}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(" :")


def described(error: BaseException) -> str:
    """The type and message of an error; where it has no message, as an assert's, the line that raised it."""
    if str(error).strip() or error.__traceback__ is None:
        return repr(error)
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(raised.filename).name}:{raised.lineno}, {raised.line!r}"


def in_progress(call: FrameType) -> bool:
    """True if a call is on the stack of this thread, by its frame.

    This tells a call that has ended in whatever way; a note that it takes back itself would stay after an
    exception at a line before that.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None

"""The option ``--constrain``: a constraint of the text as ``StructuredOutputs``."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError, StructuredOutputs, need
from outpace.files import check_plain

_KINDS = ("json", "regex", "grammar", "choice")
_LONG = 200  # characters; a longer value is no file's name


def constraint_of(given: Seq[str]) -> StructuredOutputs | None:
    """The constraint that options name; None for none.

    Raises:
        OutpaceError: a kind is unknown, or there are two of them.
    """
    found: dict[str, Any] = {}
    for one in given:
        kind, equals, value = one.partition("=")
        if kind not in _KINDS or not equals or not value:
            raise OutpaceError(
                f"--constrain takes KIND=VALUE, with a kind of {', '.join(_KINDS)}; not {one!r}"
            )
        if kind == "choice":
            found.setdefault(kind, []).append(value)
        elif kind in found:
            raise OutpaceError(f"--constrain has two values of {kind}; leave one out")
        else:
            found[kind] = _text_or_file(value)
    if not found:
        return None
    need("serve", "--constrain")
    return StructuredOutputs(**found)


def _text_or_file(value: str) -> str:
    """A file's text without its last line break, or the value itself."""
    if len(value) > _LONG or "\n" in value or not Path(value).is_file():
        return value
    check_plain(Path(value))
    try:
        return Path(value).read_text("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise OutpaceError(f"{value} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise OutpaceError(f"cannot read {value}: {error.strerror}") from None

"""Deliberate bugs, each with the tests that see it. CONTRIBUTING.md says when to add one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A wrong text in the source.

    Attributes:
        name: what is wrong, in a sentence.
        file: where, below ``src`` or ``lab/src``.
        old: the right text, which occurs once in the file.
        new: the wrong one.
        killed_by: files of tests, or ids of tests, that fail with it, all of them quick.
        only: ``-k`` of pytest, to run few of them.
        reason: why no quick test sees it; ``killed_by`` are slow tests then.
    """

    name: str
    file: str
    old: str
    new: str
    killed_by: tuple[str, ...]
    only: str = ""
    reason: str = ""


MUTANTS = [
    Mutant(
        "the first rows of a forward are kept, not those of the path",
        "outpace/cache/kv.py",
        "                path = paths.get(seat.slot, ())\n",
        "                path = range(len(paths.get(seat.slot, ())))\n",
        ("tests/unit/test_cache.py",),
    ),
]

"""Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause it while things are made that stay: modules, a model, a vocabulary.

    It would look through all of them after each few hundred more, for a sixth of the time of imports and half
    of a tokenizer's. Of several threads that load at once the first one ends the pause.
    """
    if not gc.isenabled():  # by the user, or by another thread
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

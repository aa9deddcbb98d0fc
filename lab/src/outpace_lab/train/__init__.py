"""Training of learned drafters: data, objectives, the loop, the held-out metric, and online learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace_lab.train.online import Online
    from outpace_lab.train.topics import Topics
    from outpace_lab.train.trainee import Learning

__all__ = ["Learning", "Online", "Topics"]

# The module of each name. It is imported when it is asked for: drafters derive from what is beside it.
_HOME = {"Learning": "trainee", "Online": "online", "Topics": "topics"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

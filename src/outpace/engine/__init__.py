"""The engine: the loop, and how requests come and go."""

from __future__ import annotations

from outpace.engine.engine import Engine

__all__ = ["Engine"]

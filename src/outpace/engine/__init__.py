"""The engine: the loop, and how requests come and go."""

from __future__ import annotations

from outpace.engine.aio import AsyncEngine, QueueFull
from outpace.engine.engine import Engine

__all__ = ["AsyncEngine", "Engine", "QueueFull"]

"""The engine: the decoding loop, requests, scheduling, and its asyncio front."""

from __future__ import annotations

from outpace.engine.aio import AsyncEngine, QueueFull
from outpace.engine.engine import Engine

__all__ = ["AsyncEngine", "Engine", "QueueFull"]

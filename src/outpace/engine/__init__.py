"""The engine: the decoding loop, requests, scheduling, and its asyncio front."""

from __future__ import annotations

from outpace.engine.aio import AsyncEngine
from outpace.engine.engine import Engine
from outpace.engine.handles import QueueFull

__all__ = ["AsyncEngine", "Engine", "QueueFull"]

"""What the routes need of a server's models: of one (``Service``), or of several (``Router``)."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from outpace.serve.service import Service


class Metered(Protocol):
    """What ``/metrics`` is read from."""

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""


class Host(Protocol):
    """The models of a server."""

    @property
    def metrics(self) -> Metered:
        """The metrics of all models."""

    def use(self, model: str | None) -> AbstractAsyncContextManager[Service]:
        """The service of a model, which is loaded while the context lasts; None is the first model.

        Raises:
            Refused: there is none of that name, or it cannot be loaded.
        """

    async def unload(self, model: str) -> None:
        """Unload a model, once its requests have ended.

        Raises:
            Refused: there is none of that name, or it stays.
        """

    def check(self) -> None:
        """Check that requests are taken.

        Raises:
            Refused: they are not.
        """

    def cards(self) -> list[dict[str, Any]]:
        """The models as ``/v1/models`` lists them."""

    async def health(self) -> dict[str, Any]:
        """What ``/health`` says, besides that the server is well.

        Raises:
            Refused: it is not.
        """

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish, and end the rest after this many seconds."""

    async def close(self) -> None:
        """End the engines."""

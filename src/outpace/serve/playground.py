"""The playground at ``/``: static files, sent with a policy that allows a browser to load nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class File(NamedTuple):
    """A file of the page, and its media type."""

    content: bytes
    kind: str

    def response(self) -> Response:
        """The file, with the headers of every file of the page."""
        return Response(self.content, media_type=self.kind, headers=_HEADERS)


def _read() -> dict[str, File]:
    folder = Path(__file__).parent / "static"
    found = {
        f"/static/{path.relative_to(folder).as_posix()}": File(path.read_bytes(), _TYPES[path.suffix])
        for path in folder.rglob("*.*")
    }
    return {"/": found.pop("/static/index.html"), **found}


FILES = _read()

"""A hub in this process, over HTTP: what of the Hugging Face hub's API fetching a model needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def local_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Serve repositories: name -> path of a file -> its content. Its address, and the paths asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlparse(self.path).path)
            asked.append(f"{self.command} {path}")
            for name, files in repositories.items():
                if path.startswith(f"/api/models/{name}/tree/"):
                    return self.answer([one | {"type": "file"} for one in self.listed(files)])
                if path == f"/api/models/{name}" or path.startswith(f"/api/models/{name}/revision/"):
                    found = [{"rfilename": one["path"], "size": one["size"]} for one in self.listed(files)]
                    about = {"id": name, "sha": COMMIT, "siblings": found, "private": False}
                    return self.answer(about | {"downloads": 0, "tags": []})
                for file, content in files.items():
                    if path == f"/{name}/resolve/main/{file}" or path == f"/{name}/resolve/{COMMIT}/{file}":
                        return self.send(200, content)
            known = any(path.startswith(f"/{name}/") for name in repositories)
            self.send(404, b"{}", "X-Error-Code", "EntryNotFound" if known else "RepoNotFound")

        def listed(self, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
            return [
                {"path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in files.items()
            ]

        def answer(self, value: Any) -> None:
            self.send(200, json.dumps(value).encode(), "Content-Type", "application/json")

        def send(self, status: int, body: bytes, *header: str) -> None:
            self.send_response(status)
            if header:
                self.send_header(*header)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

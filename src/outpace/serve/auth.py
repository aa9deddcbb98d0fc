"""Who may send a request: keys, and the paths that need none."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers

from outpace.core import OutpaceError
from outpace.serve.errors import Refused
from outpace.serve.playground import FILES

OPEN = {"/health", "/health/ready", *FILES}  # monitors have no key


class Keys:
    """Keys of which requests must send one; without keys, all requests are accepted.

    Only digests are kept. Each request is compared with all of them, in a time independent of their values.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: Path | None, environment: str = "") -> Keys:
        """The keys of a file, one per line, and of an environment variable, separated by commas.

        Raises:
            OutpaceError: the file cannot be read, or contains no key.
        """
        keys = [key.strip() for key in environment.split(",") if key.strip()]
        if path is not None:
            try:
                lines = path.read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise OutpaceError(f"cannot read the keys in {path}: {error}") from error
            found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not found:
                raise OutpaceError(f"{path} contains no key; write one per line")
            keys += found
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def tenant(self, headers: Headers) -> str | None:
        """The tenant of a request's key; None if no key is needed.

        Raises:
            Refused: the key is missing or wrong.
        """
        if not self._digests:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        equal = [hmac.compare_digest(digest, key) for key in self._digests]
        if not any(equal):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY or x-api-key"
            raise Refused(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return digest.hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

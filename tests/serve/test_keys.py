"""Keys: what a comparison takes tells nothing of them."""

from __future__ import annotations

import hmac

import pytest
from starlette.datastructures import Headers

from outpace.serve import auth
from outpace.serve.auth import Keys
from outpace.serve.errors import Refused


@pytest.mark.parametrize("given", ["first", "last", "firs", "", "f", "x" * 10_000, "é", "\udcff"])
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_each_key_is_compared_with_all_as_digests(
    given: str, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []

    def counted(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(auth, "hmac", type("hmac", (), {"compare_digest": staticmethod(counted)}))
    keys = Keys(["first", "middle", "last"])
    sent = f"Bearer {given}" if header == "authorization" else given
    headers = Headers({header: sent}) if given.isascii() else Headers(raw=[(header.encode(), b"\xff")])
    if given in ("first", "last"):
        assert keys.tenant(headers) is not None
    else:
        with pytest.raises(Refused):
            keys.tenant(headers)
    assert compared == [(32, 32)] * 3

"""What outpace-lab registers with outpace."""

from __future__ import annotations

from outpace.plugins import installed, moved


def test_what_the_laboratory_registers_is_told_where_it_is_missing() -> None:
    for kind in ("drafter", "observer", "peer", "suite", "verifier"):
        assert all(moved(kind, name) for name in installed(f"{kind}s"))

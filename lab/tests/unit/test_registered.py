"""What outpace-lab registers with outpace."""

from __future__ import annotations

from outpace.plugins import installed, why_absent


def test_what_the_laboratory_registers_is_told_where_it_is_missing() -> None:
    for kind in ("drafter", "observer", "peer", "suite", "verifier"):
        assert all(why_absent(kind, name) for name in installed(f"{kind}s"))

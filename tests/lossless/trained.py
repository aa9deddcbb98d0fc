"""Learned drafters for the embedded model: those in ``tests/trained``."""

from __future__ import annotations

from pathlib import Path

TRAINED = Path(__file__).parents[1] / "trained"


def with_trained(spec: str) -> str:
    """The spec, ``{trained}`` in it replaced by the folder of such a drafter."""
    return spec.replace("{trained}", str(TRAINED / spec.partition(":")[0]))

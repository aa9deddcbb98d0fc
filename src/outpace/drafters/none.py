"""Plain decoding: the drafter that proposes nothing, baseline of every benchmark, reference of every test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.core import Draft
from outpace.drafters.base import SequenceDrafter
from outpace.sequence import Sequence

_EMPTY = Draft()


@dataclass(frozen=True)
class NoDraft(SequenceDrafter[None]):
    """Plain decoding."""

    name: ClassVar[str] = "none"
    when: ClassVar[str] = "to measure plain decoding, the baseline"
    paper: ClassVar[str] = "none: plain autoregressive decoding"

    def start(self, sequence: Sequence, shared: Any) -> None:
        return None

    def draft(self, state: None) -> Draft:
        return _EMPTY

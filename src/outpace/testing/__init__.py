"""For tests, here and elsewhere: a small target without transformers, and the checks of a drafter."""

from __future__ import annotations

from outpace.testing.checks import check_drafter
from outpace.testing.toy import ToyTarget

__all__ = ["ToyTarget", "check_drafter"]

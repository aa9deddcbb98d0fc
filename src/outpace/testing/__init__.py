"""Tools for testing drafters: a small target without transformers, and the checks of the contract."""

from __future__ import annotations

from outpace.testing.checks import check_drafter
from outpace.testing.toy import ToyTarget

__all__ = ["ToyTarget", "check_drafter"]

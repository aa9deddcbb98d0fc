"""Drafters among which a request chooses."""

from __future__ import annotations

import pytest

from outpace.core import OutpaceError
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget
from outpace_lab.drafters.layers.early_exit import EarlyExit


def test_one_that_replaces_the_target_is_refused() -> None:
    with pytest.raises(OutpaceError, match="replaces the target"):
        Engine(ToyTarget(), "prompt_lookup", drafters={"early": EarlyExit(layers=1)})

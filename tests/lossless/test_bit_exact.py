"""Bit-exact targets: no token differs, by any drafter, batch or number of threads."""

from __future__ import annotations

import pytest
import torch

from lossless.conftest import lab_on
from lossless.test_matrix import SPECS
from outpace.native.layers import functions
from outpace.targets.cpu.trials import using_threads
from parts import in_turn

pytestmark = pytest.mark.skipif(isinstance(functions(torch.float32), str), reason="nothing is compiled here")

# Those that need nothing trained for the test: chains, trees and readers of hidden states; others are slow.
HERE = {name: spec for name, spec in SPECS.items() if "{" not in spec}
QUICK = {"suffix", "draft_model, trees", "eagle, trees"}


@pytest.mark.parametrize(("drafter", "dtype"), in_turn(HERE, [torch.float32, torch.bfloat16], among=QUICK))
def test_drafted_tokens_are_those_of_plain_decoding(drafter: str, dtype: torch.dtype) -> None:
    """Plainly one by one with one thread; with drafts in a batch that they join one by one, with three."""
    lab = lab_on(dtype)
    assert lab.target.bit_exact, lab.target.why_inexact
    with using_threads(1):
        lab.alone()
    with using_threads(3):
        lab.check_joining(HERE[drafter])

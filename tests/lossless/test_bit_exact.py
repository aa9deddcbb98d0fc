"""Bit-exact targets: no token differs, by any drafter, batch or number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lossless.conftest import lab_on
from lossless.test_matrix import SPECS
from outpace.native.layers import functions
from outpace.targets.cpu.trials import using_threads
from outpace.testing.matrix import SAMPLINGS

pytestmark = pytest.mark.skipif(isinstance(functions(torch.float32), str), reason="nothing is compiled here")

# Those that need nothing trained for the test.
HERE = {name: spec for name, spec in SPECS.items() if "{" not in spec}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", HERE)
def test_drafted_tokens_are_those_of_plain_decoding(drafter: str, dtype: torch.dtype) -> None:
    """Plainly one by one with one thread; with drafts in a batch that they join one by one, with three."""
    lab, samplings = lab_on(dtype), list(SAMPLINGS)
    requests = [
        (prompt, replace(lab.params(samplings[place % 3])[place], max_new_tokens=24))
        for place, prompt in enumerate(lab.prompts[:6])
    ]
    assert lab.target.bit_exact, lab.target.inexact
    with using_threads(1):
        plain = [lab.engine("none").generate([prompt], params)[0].tokens for prompt, params in requests]
    sequences = []
    with using_threads(3):
        engine = lab.engine(HERE[drafter])
        for request in requests:
            sequences.append(engine.add(*request))
            engine.step()
        while engine.sequences:
            engine.step()
    assert [sequence.output for sequence in sequences] == plain

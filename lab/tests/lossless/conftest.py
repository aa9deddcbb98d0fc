"""The embedded model and its plain decoding, and Medusa-2's target."""

from __future__ import annotations

import pytest
import torch

from lossless.conftest import Lab, embedded, lab_on
from outpace.targets.weights.adapters import merge
from outpace_lab.train.joint import TARGET
from taught import tuned


@pytest.fixture(scope="session")
def exact() -> Lab:
    """In float64: no difference is allowed."""
    return lab_on(torch.float64)


@pytest.fixture(scope="session")
def single() -> Lab:
    """In float32: a difference is allowed only at a near-tie."""
    return lab_on(torch.float32)


@pytest.fixture(scope="session")
def tuned_exact() -> Lab:
    """Medusa-2's target in float64."""
    pytest.importorskip("peft")
    return Lab(merge(embedded(torch.float64), tuned() / TARGET))


@pytest.fixture(scope="session")
def tuned_single() -> Lab:
    """Medusa-2's target in float32."""
    pytest.importorskip("peft")
    return Lab(merge(embedded(torch.float32), tuned() / TARGET))

"""What a step may cost on an accelerator, by drafter: counts of two sequences of the embedded model.

A change that lowers a count lowers its budget here. The aims are 1 host read, and no copy that blocks.
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """The most of each count per step, on average over a text's steps after its first.

    Attributes:
        launches: kernels outside graphs.
        reads: times that the host waits for the device.
        copies: uploads.
        blocking: those of them that wait for the device.
    """

    launches: float
    reads: float
    copies: float
    blocking: float


# Of greedy and sampled decoding without fixed shapes, then of both with them.
BUDGETS: dict[str, list[Budget]] = {}

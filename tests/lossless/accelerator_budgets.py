"""What a step may cost on an accelerator, by drafter: counts of two sequences of the embedded model.

A change that lowers a count lowers its budget here. A draft and its verification may read once each.
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
BUDGETS: dict[str, list[Budget]] = {
    "none": [Budget(294.5, 1, 4, 0), Budget(294.5, 1, 5, 0), Budget(5.5, 1, 1, 0), Budget(5.5, 1, 2, 0)],
    "jacobi": [
        Budget(308.9, 1, 3.7, 0),
        Budget(318.7, 2.7, 8, 0),
        Budget(6.4, 1, 1, 0),
        Budget(16.2, 2.7, 5.4, 0),
    ],
    "lookahead": [
        Budget(308.5, 1, 3.8, 0),
        Budget(322.2, 2.4, 7.7, 0),
        Budget(8.3, 1, 1.5, 0),
        Budget(14.5, 2.4, 4.7, 0),
    ],
    "prompt_lookup": [
        Budget(315, 1, 3.8, 0),
        Budget(303.6, 1, 5, 0),
        Budget(7.2, 1, 1.2, 0),
        Budget(6, 1, 2, 0),
    ],
    "reference": [
        Budget(317.5, 1, 3.5, 0),
        Budget(308.2, 1, 4.4, 0),
        Budget(8, 1, 1.5, 0),
        Budget(7.7, 1, 2.5, 0),
    ],
    "suffix": [Budget(0, 0, 0, 0), Budget(0, 0, 0, 0), Budget(0, 0, 0, 0), Budget(0, 0, 0, 0)],
    "combined": [
        Budget(326.4, 2.7, 6.4, 0),
        Budget(317.5, 3.5, 8, 0),
        Budget(14.7, 2.7, 3.4, 0),
        Budget(91, 3.5, 5.8, 0),
    ],
    "draft_model": [
        Budget(306.9, 1.8, 3.9, 0),
        Budget(307.1, 1.8, 4.9, 0),
        Budget(9.7, 1.8, 1.9, 0),
        Budget(9.7, 1.8, 2.9, 0),
    ],
    "draft_model, trees": [
        Budget(311.3, 1.9, 4.9, 0),
        Budget(310.5, 1.9, 5.3, 0),
        Budget(12.3, 1.9, 2.6, 0),
        Budget(10.9, 1.9, 3.3, 0),
    ],
    "medusa": [
        Budget(361.3, 2, 4.7, 0),
        Budget(411.4, 1.9, 6.8, 0),
        Budget(13, 2, 2.2, 0),
        Budget(14.9, 1.9, 4.3, 0),
    ],
    "hydra": [
        Budget(378.4, 2, 8.1, 0),
        Budget(416, 2, 6, 0),
        Budget(19.4, 2, 5.1, 0),
        Budget(13.7, 2, 3.7, 0),
    ],
    "eagle": [Budget(551.8, 2, 6, 0), Budget(543, 2, 7, 0), Budget(23.3, 2, 3.8, 0), Budget(24.1, 2, 4.7, 0)],
    "eagle, trees": [
        Budget(607.9, 2, 6, 0),
        Budget(671.8, 2, 7.2, 0),
        Budget(23.8, 2, 3.8, 0),
        Budget(25.1, 2, 5, 0),
    ],
    "dflash": [
        Budget(447.2, 2, 5.5, 0),
        Budget(456.5, 2, 6.5, 0),
        Budget(18.8, 2, 2.9, 0),
        Budget(18.8, 2, 3.9, 0),
    ],
    "dflash, trees": [
        Budget(560, 2, 7.5, 0),
        Budget(600, 2, 8.5, 0),
        Budget(24, 2, 4.5, 0),
        Budget(25, 2, 5.5, 0),
    ],
    "mtp": [
        Budget(622.2, 2, 6, 0),
        Budget(621.3, 2, 7.1, 0),
        Budget(20.8, 2, 3.8, 0),
        Budget(21.2, 2, 4.7, 0),
    ],
    "mtp, trees": [
        Budget(689.9, 1.9, 7.6, 0),
        Budget(750.9, 1.9, 8.4, 0),
        Budget(24.6, 1.9, 4.6, 0),
        Budget(23.9, 1.9, 5.4, 0),
    ],
    "mtp, a part": [
        Budget(629.4, 1.9, 5.9, 0),
        Budget(760.4, 1.9, 8, 0),
        Budget(20.7, 1.9, 3.7, 0),
        Budget(54.1, 1.9, 5.6, 0),
    ],
    "hydra, by confidence": [
        Budget(395.8, 2, 5.8, 0),
        Budget(424.1, 1.9, 6.1, 0),
        Budget(15.8, 2, 2.8, 0),
        Budget(13.8, 1.9, 3.6, 0),
    ],
}

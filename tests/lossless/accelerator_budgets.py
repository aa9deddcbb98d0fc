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
BUDGETS: dict[str, list[Budget]] = {
    "none": [Budget(294.5, 1, 4, 0), Budget(327.5, 1, 6, 0), Budget(5.5, 1, 1, 0), Budget(38.5, 1, 3, 0)],
    "jacobi": [
        Budget(308.9, 1, 3.7, 0),
        Budget(405, 2.7, 10.7, 1.7),
        Budget(6.4, 1, 1, 0),
        Budget(102.5, 2.7, 8, 1.7),
    ],
    "lookahead": [
        Budget(308.5, 1, 3.8, 0),
        Budget(397.9, 2.4, 10, 1.4),
        Budget(8.3, 1, 1.5, 0),
        Budget(90.2, 2.4, 7, 1.4),
    ],
    "prompt_lookup": [
        Budget(315, 1, 3.8, 0),
        Budget(336.6, 1, 6, 0),
        Budget(7.2, 1, 1.2, 0),
        Budget(39, 1, 3, 0),
    ],
    "reference": [
        Budget(317.5, 1, 3.5, 0),
        Budget(341.2, 1, 5.4, 0),
        Budget(8, 1, 1.5, 0),
        Budget(40.7, 1, 3.5, 0),
    ],
    "suffix": [Budget(0, 0, 0, 0), Budget(0, 0, 0, 0), Budget(0, 0, 0, 0), Budget(0, 0, 0, 0)],
    "retrieval": [
        Budget(317.6, 1, 4, 0),
        Budget(341.4, 1, 5.7, 0),
        Budget(7.8, 1, 1.4, 0),
        Budget(39.7, 1, 3.2, 0),
    ],
    "token_recycling": [
        Budget(324, 2.5, 5.5, 1.5),
        Budget(339.4, 2.4, 7, 1.4),
        Budget(326.5, 2.5, 3.5, 1.5),
        Budget(149, 2.4, 5, 1.4),
    ],
    "combined": [
        Budget(324.7, 2.7, 6.4, 1.7),
        Budget(381.3, 3.5, 10, 2.3),
        Budget(13, 2.7, 3.4, 1.7),
        Budget(154.8, 3.5, 7.8, 2.3),
    ],
    "draft_model": [
        Budget(602, 3.4, 10.2, 0),
        Budget(734.6, 16.2, 12, 0),
        Budget(304.8, 3.4, 8.2, 0),
        Budget(437.2, 16.2, 10, 0),
    ],
    "draft_model, trees": [
        Budget(630.5, 6.3, 13, 0),
        Budget(814.6, 30.8, 15.6, 0),
        Budget(331.5, 6.3, 10.8, 0),
        Budget(515, 30.8, 13.6, 0),
    ],
    "medusa": [
        Budget(337.7, 6, 8.7, 0),
        Budget(468.9, 15.2, 13.7, 0),
        Budget(31.8, 6, 6.3, 0),
        Budget(166, 15.2, 11.2, 0),
    ],
    "hydra": [
        Budget(347.4, 7, 11, 0),
        Budget(514, 21.8, 14.6, 0),
        Budget(38.4, 7, 8, 0),
        Budget(212.6, 21.8, 12.3, 0),
    ],
    "eagle": [
        Budget(498.3, 3.4, 18.9, 0),
        Budget(643.2, 16.5, 20.8, 0),
        Budget(197.4, 3.4, 16.7, 0),
        Budget(343.8, 16.5, 18.5, 0),
    ],
    "eagle, trees": [
        Budget(509.7, 8, 21, 0),
        Budget(836.5, 43.2, 31.2, 0),
        Budget(204.4, 8, 18.8, 0),
        Budget(532.9, 43.2, 28.9, 0),
    ],
    "dflash": [
        Budget(429.4, 3.4, 14.9, 0),
        Budget(603, 18.4, 16.9, 0),
        Budget(128, 3.4, 12.3, 0),
        Budget(301.7, 18.4, 14.3, 0),
    ],
    "mtp": [
        Budget(563.9, 3.4, 16.6, 0),
        Budget(709.7, 16, 18.4, 0),
        Budget(263, 3.4, 14.4, 0),
        Budget(409.3, 16, 16, 0),
    ],
    "mtp, trees": [
        Budget(591, 8, 23.2, 0),
        Budget(936.9, 46.9, 32.2, 0),
        Budget(282.9, 8, 20.2, 0),
        Budget(629.5, 46.9, 29.2, 0),
    ],
    "hydra, by confidence": [
        Budget(348.4, 7, 10.4, 0),
        Budget(571, 29.4, 16.4, 0),
        Budget(36.4, 7, 7.4, 0),
        Budget(268.7, 29.4, 13.9, 0),
    ],
}

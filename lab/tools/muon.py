"""The Muon optimizer in the precision of its parameters.

torch.optim.Muon orthogonalises in bfloat16, which a processor without bfloat16 arithmetic does a hundred
times slower than float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, from Jordan et al. 2024 (kellerjordan.github.io/posts/muon)."""

STEPS = 5


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024), with updates of AdamW's size (Liu et al. 2025).

    Takes matrices only. Updates are scaled by 0.2 sqrt(max(rows, columns)) as in arXiv 2502.16982, section
    2.2, so that learning rates of AdamW can be kept.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                # Nesterov: look one step of momentum ahead.
                update = matrix.grad.lerp(state["momentum_buffer"], group["momentum"])
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                scale = 0.2 * math.sqrt(max(matrix.shape))
                matrix.add_(orthogonalised(update), alpha=-scale * group["lr"])


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """About U V^T, where the matrix is U S V^T: its singular values end between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x

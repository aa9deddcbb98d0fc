"""For tests of learning: a little training, and a tokenizer for texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outpace_lab.train.objectives import ground_truth
from outpace_lab.train.trained import Losses, Trained, TrainingBatch


def train(module: Trained, batch: TrainingBatch, steps: int, rate: float = 5e-3) -> list[Losses]:
    """The losses of some steps on one batch; the module is ready to draft afterwards."""
    seen = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(module.parameters(), rate)
        for _ in range(steps):
            losses = module.loss(batch, ground_truth)
            optimizer.zero_grad()
            losses.total.backward()
            optimizer.step()
            seen.append(replace(losses, total=losses.total.detach()))
    module.requires_grad_(False).eval()
    module.calibrate([batch])
    return seen


class Letters:
    """A tokenizer of letters; a chat is formatted as its roles and texts."""

    def tokens(self, text: str) -> list[int]:
        return [1, *self.plain_tokens(text)]

    def plain_tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.plain_tokens("".join(turn["role"][0] + turn["content"] for turn in messages) + "a")

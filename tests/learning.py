"""For tests of learned drafters: a little training, a look at steps, and a tokenizer for texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.learned.learned import Batch, Learned, Losses
from outpace.sequence import Step
from outpace_lab.train.objectives import ground_truth


def train(module: Learned, batch: Batch, steps: int, rate: float = 5e-3) -> list[Losses]:
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


@dataclass
class Watch:
    """Looks on while an engine decodes, and keeps its steps."""

    hidden_layers: tuple[int, ...] = ()
    timed: bool = False
    steps: list[Step] = field(default_factory=list)

    def joined(self, sequence: object, hidden: Mapping[int, Tensor]) -> None: ...

    def stepped(self, steps: Sequence[Step]) -> None:
        self.steps += steps

    def left(self, sequence: object) -> None: ...


class Letters:
    """A tokenizer of letters; a chat is formatted as its roles and texts."""

    def tokens(self, text: str) -> list[int]:
        return [1, *self.plain_tokens(text)]

    def plain_tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.plain_tokens("".join(turn["role"][0] + turn["content"] for turn in messages) + "a")

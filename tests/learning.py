"""For tests of learned drafters: text with what a target says at each place, and a little training."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.drafting.learned import Batch, Learned, Losses
from outpace.targets import Rows, TargetModel


def cross_entropy(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(draft, labels, reduction="none")


def batch_of(target: TargetModel, texts: Seq[Seq[int]], layers: Seq[int], counted_from: int = 1) -> Batch:
    """Texts packed into one row; a token is to be learnt from place ``counted_from`` of its text on."""
    parts = []
    for document, text in enumerate(texts):
        cache = target.new_cache(1, len(text))
        cache.allocate()
        output = target.forward(cache, [Rows(text)], hidden_layers=layers)
        assert output.logits is not None
        places = torch.arange(len(text))
        parts.append((text, places, document, output.hidden, output.logits[0]))
    return Batch(
        tokens=torch.cat([torch.tensor(text) for text, *_ in parts])[None],
        positions=torch.cat([places for _, places, *_ in parts])[None],
        documents=torch.cat([torch.full_like(places, number) for _, places, number, *_ in parts])[None],
        counted=torch.cat([places >= counted_from for _, places, *_ in parts])[None],
        hidden={layer: torch.cat([part[3][layer][0] for part in parts])[None].clone() for layer in layers},
        logits=torch.cat([part[4] for part in parts])[None].clone(),
    )


def train(module: Learned, batch: Batch, steps: int, rate: float = 5e-3, seed: int = 0) -> list[Losses]:
    """The losses of some steps on one batch; the module is ready to draft afterwards."""
    seen = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        optimiser = torch.optim.Adam(module.parameters(), rate)
        for _ in range(steps):
            losses = module.loss(batch, cross_entropy)
            optimiser.zero_grad()
            losses.total.backward()
            optimiser.step()
            seen.append(losses)
    module.requires_grad_(False).eval()
    return seen


def replayed(accepted: Tensor, begins: Seq[int], ends: Seq[int]) -> float:
    """Tokens per step of decoding some texts of which [T] tokens stand at each place.

    Args:
        begins: place of each text's first root.
        ends: place of each text's last token.
    """
    tokens = steps = 0
    for place, end in zip(begins, ends, strict=True):
        while place < end:
            taken = min(int(accepted[place]) + 1, end - place)
            place, tokens, steps = place + taken, tokens + taken, steps + 1
    return tokens / steps

"""The drift of a lossy verifier's output: tokens changed, and their likelihood under the target."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from outpace.core import OutpaceError
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch

_CHUNK = 512  # tokens fed in one forward


@dataclass(frozen=True)
class Drift:
    """Counts and sums over outputs and plain decoding's of the same prompts; add them with ``+``.

    Attributes:
        plain_tokens: number of tokens of plain decoding.
        tokens: number of tokens of the outputs.
        places: number of positions, by the longer one of each pair of outputs.
        changed: number of positions where the two differ, or one has ended.
        plain_nats: negative log likelihood of plain decoding's tokens under the target, in nats.
        nats: negative log likelihood of the outputs' tokens.
    """

    plain_tokens: int = 0
    tokens: int = 0
    places: int = 0
    changed: int = 0
    plain_nats: float = 0.0
    nats: float = 0.0

    def __add__(self, other: Drift) -> Drift:
        return Drift(
            *(mine + yours for mine, yours in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def share_changed(self) -> float:
        """Share of positions where the output differs from plain decoding's."""
        return self.changed / self.places if self.places else 0.0

    @property
    def plain_loss(self) -> float:
        """Mean loss of plain decoding under the target, in nats per token."""
        return self.plain_nats / self.plain_tokens if self.plain_tokens else 0.0

    @property
    def loss(self) -> float:
        """Mean loss of the output under the target, in nats per token."""
        return self.nats / self.tokens if self.tokens else 0.0


def measure_drift(
    target: TargetModel, prompt: Seq[int], plain: Seq[int], output: Seq[int], source: Any = None
) -> Drift:
    """Compare an output with plain decoding's, of one prompt, with the same parameters and seed.

    Args:
        target: the target that both were decoded with.
        prompt: token ids, at least one.
        plain: output tokens of plain decoding.
        output: output tokens under the lossy verifier.
        source: the encoder's input, for a target that has one.

    Raises:
        OutpaceError: the prompt is empty, or the source does not fit the target.
    """
    same = sum(a == b for a, b in zip_longest(plain, output))
    places = max(len(plain), len(output))
    return Drift(
        plain_tokens=len(plain),
        tokens=len(output),
        places=places,
        changed=places - same,
        plain_nats=negative_log_likelihood(target, prompt, plain, source),
        nats=negative_log_likelihood(target, prompt, output, source),
    )


def negative_log_likelihood(
    target: TargetModel, prompt: Seq[int], output: Seq[int], source: Any = None
) -> float:
    """Negative log likelihood of output tokens after a prompt, under the target's raw distribution, in nats.

    Raises:
        OutpaceError: the prompt is empty, or the source does not fit the target.
    """
    if not len(prompt):
        raise OutpaceError("the prompt is empty: it needs at least one token")
    text = [*prompt, *output]
    cache = target.new_cache(1, len(text))
    slot = target.open(cache, target.encode(source))
    nats = 0.0
    for start in range(0, len(text) - 1, _CHUNK):
        end = min(start + _CHUNK, len(text) - 1)
        # The row of a token predicts the next one, so the prompt's last row is the first that counts.
        first = min(max(len(prompt) - 1 - start, 0), end - start)
        rows = target.forward(
            cache, Batch.of({slot: text[start:end]}, None if first == end - start else first)
        ).logits
        cache.keep({slot: range(end - start)})
        if rows is not None:
            logprobs = rows.double().log_softmax(dim=-1)
            said = torch.tensor(text[start + first + 1 : end + 1], device=rows.device)
            nats -= float(logprobs.gather(1, said[:, None]).sum())
    return nats

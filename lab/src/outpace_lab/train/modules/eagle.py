"""EAGLE as it learns: the module, unrolled along a text.

See ``outpace.drafters.eagle.eagle_module``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.drafters.eagle.eagle_module import EagleConfig, EagleModule
from outpace.learned.frequent import most_frequent
from outpace.learned.learned import head_weights
from outpace.targets.base import TargetModel
from outpace_lab.train.modules import published
from outpace_lab.train.trained import Losses, Objective, TrainingBatch
from outpace_lab.train.unrolled import Unrolled, unroll

_RIDGE = 1e-3  # of a least squares' diagonal, relative to it


class TrainedEagle(EagleModule, Unrolled):
    """EAGLE's layers, in training."""

    _untrained = False

    @classmethod
    def new(cls, config: EagleConfig, target: TargetModel) -> Self:
        made = super().new(config, target)
        made._untrained = True
        made._begin_with_the_head()
        return made

    @torch.no_grad()
    def suit(self, counts: Tensor) -> None:
        """Draft the most frequent tokens, of equally frequent ones the first; trained weights keep theirs."""
        if self.drafted is None or not self._untrained:
            return
        self._untrained = False
        ids = most_frequent(counts, len(self.d2t)).to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_().index_fill_(0, ids, True)
        self._partial = None
        self._begin_with_the_head()

    @torch.no_grad()
    def _begin_with_the_head(self) -> None:
        """Initialise its own head, if it has one, from the target's, if that is a matrix."""
        if not self.config.own_head:
            return
        found = head_weights(self.target)
        if found is not None:
            matrix, _ = found
            self.lm_head.weight.copy_(matrix if self.drafted is None else matrix[self.drafted])

    @torch.no_grad()
    def begin_linearly(self, batches: Iterable[TrainingBatch]) -> None:
        """Fit the map before the layers by least squares, and let each layer add nothing at first."""
        if not self.config.linear_start:
            return
        inputs = self.fc.in_features + 1
        squares = torch.zeros(inputs, inputs, dtype=torch.float64, device=self.fc.weight.device)
        products = squares.new_zeros(inputs, self.fc.out_features)
        for batch in batches:
            where = (batch.documents[:, 1:] == batch.documents[:, :-1]) & (batch.documents[:, 1:] >= 0)
            tokens = batch.tokens[:, 1:][where]
            embedded = self.embed_tokens(tokens) if self.config.own_embeddings else self.target.embed(tokens)
            states = batch.hidden[self.config.layers[0]].double()
            before, after = states[:, :-1][where], states[:, 1:][where]
            rows = torch.cat([embedded.double(), before, before.new_ones(len(before), 1)], dim=-1)
            squares += rows.T @ rows
            products += rows.T @ after
        # Least squares alone are singular if there are fewer rows than inputs.
        squares.diagonal().mul_(1 + _RIDGE).add_(_RIDGE)
        solved = torch.linalg.solve(squares, products).T
        self.fc.weight.copy_(solved[:, :-1])
        self.fc.bias.copy_(solved[:, -1])
        for name, weight in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight")):
                weight.zero_()

    @property
    def ids(self) -> Tensor | None:
        return self.drafted

    def unroll(self, batch: TrainingBatch, steps: int) -> Iterator[Tensor]:
        features = self.features({layer: states[:, :-1] for layer, states in batch.hidden.items()})
        return unroll(batch, features, steps, self.config.depth, self.advance)

    def loss(self, batch: TrainingBatch, objective: Objective) -> Losses:
        """The objective over all depths; for EAGLE-1 also a regression on the features (section 4.2)."""
        config = self.config
        outputs = list(self.unroll(batch, config.steps))
        weights = [config.decay**depth for depth in range(config.steps)]
        if config.version == 1:
            weights = [config.classification * weight for weight in weights]
        losses = self.measured(batch, objective, outputs, weights)
        total = losses.total
        if config.version == 1:
            total = total + self._regression(batch, outputs)
        return dataclasses.replace(losses, total=total)

    def _regression(self, batch: TrainingBatch, outputs: list[Tensor]) -> Tensor:
        """The smooth L1 loss between outputs and the features that they replace (row s: place s + 1 + j)."""
        total = outputs[0].new_zeros(())
        for depth, states in enumerate(outputs):
            where = batch.ahead(depth + 2)[:, :-1]
            wanted = batch.hidden[-1].roll(-1 - depth, dims=1)[:, :-1][where].to(states)
            distance = F.smooth_l1_loss(states[where], wanted, reduction="sum")
            total = total + self.config.decay**depth * distance / max(wanted.numel(), 1)
        return total

    def publish(self, folder: str | Path) -> None:
        """Write an EAGLE-3 in the layout of speculators, for other engines.

        Raises:
            OutpaceError: it is an EAGLE-1, or has no own head and the target's is not a plain matrix.
        """
        if self.config.version != 3:
            raise OutpaceError("eagle: speculators' layout is for EAGLE-3 only; keep the saved folder")
        tensors = dict(self.state_dict())
        drafted = torch.arange(self.fit.vocabulary) if self.drafted is None else self.drafted.cpu()
        if not self.config.own_head:
            found = head_weights(self.target)
            if found is None or bool(found[1].any()):
                raise OutpaceError("eagle: the target's head is not a plain matrix; train with own_head=true")
            tensors["lm_head.weight"] = found[0][drafted.to(found[0].device)].to(self.fc.weight.dtype)
        tensors["d2t"] = drafted - torch.arange(len(drafted))
        tensors["t2d"] = torch.zeros(self.fit.vocabulary, dtype=torch.bool).index_fill(0, drafted, True)
        model = self.target.model or self.target
        verifier = {"name_or_path": self.fit.name, "architectures": [type(model).__name__]}
        published.write(
            folder, dataclasses.asdict(self.config), self.config.transformers(), verifier, tensors
        )

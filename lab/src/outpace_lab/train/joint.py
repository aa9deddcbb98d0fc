"""Training a drafter together with its target: Medusa-2 (Cai et al. 2024, arXiv 2401.10774, section 2.2.2).

The loss is the drafter's, on hidden states through which gradients reach the target, plus the target's own.
By default the latter is the divergence from the target's original distribution (section 2.3.2), so no text
other than the target's answers is needed. At first the drafter learns alone; the target learns at a lower
rate.

Differences from the paper: any drafter that reads the target's hidden states can be trained like this, not
only heads; the target's head is not updated, because the heads share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.targets.stock.causal import CausalTarget
from outpace_lab.train.lora import LoRA, Updates
from outpace_lab.train.objectives import objective
from outpace_lab.train.trained import Losses, Objective, Trained, TrainingBatch, measure

TARGET = "target"  # the folder of the target's updates, in the drafter's


@dataclass(frozen=True)
class JointConfig:
    """Modules trained together: a drafter's method and options, and the target's updates."""

    method: str
    module: Any
    lora: LoRA


class Joint(Trained):
    """A drafter's module and low-rank updates of its target's weights.

    The target itself is unchanged: it is the teacher, and the text is its own. The module reads the hidden
    states of the updated target.

    Args:
        module: bound to its target.

    Raises:
        OutpaceError: peft is missing; or the module reads no hidden states; or the target is not a
            decoder-only transformers model.
    """

    method: ClassVar[str] = "joint"
    config_type: ClassVar[type[Any]] = JointConfig

    def __init__(self, module: Trained, lora: LoRA) -> None:
        super().__init__(JointConfig(module.method, module.config, lora), module.fit)
        target = module.target
        if not isinstance(target, CausalTarget):
            raise OutpaceError(
                f"lora: a {type(target).__name__} cannot be trained; give a decoder-only transformers model"
            )
        if not module.hidden_layers:
            raise OutpaceError(
                f"lora: {module.method} reads no hidden states, so training the target would not help it; "
                "train it without lora"
            )
        own = objective(lora.objective)
        self.module = module
        self.lora = lora
        self._updates = Updates(target.model, lora)
        target.keep_modules()  # the updates in the model are zeros
        self.updates = nn.ParameterList(self._updates.fresh())
        self._own_objective = own
        self._alone = True
        self.bind(target)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return ()  # the hidden states of the original target are not needed

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The updates by their names in the target's model."""
        return dict(zip(self._updates.names, self.updates, strict=True))

    def suit(self, counts: Tensor) -> None:
        self.module.suit(counts)

    def begin_linearly(self, batches: Iterable[TrainingBatch]) -> None:
        self.module.begin_linearly(batches)

    def at_step(self, step: int, steps: int) -> None:
        self._alone = step < round(self.lora.warmup * steps)
        self.module.at_step(step, steps)

    def groups(self) -> list[tuple[float, list[nn.Parameter]]]:
        return [*self.module.groups(), (self.lora.rate, list(self.updates))]

    def loss(self, batch: TrainingBatch, objective: Objective) -> Losses:
        heard, logits = self._heard(batch)
        own = self._own(batch, logits).total
        if not (self.training and self._alone):
            losses = self.module.loss(heard, objective)
            return replace(losses, total=losses.total + self.lora.weight * own)
        frozen = {layer: states.detach() for layer, states in heard.hidden.items()}
        losses = self.module.loss(replace(heard, hidden=frozen), objective)
        # Gradients of zero instead of none: distributed training waits for one of every weight.
        return replace(losses, total=losses.total + 0.0 * own)

    def _heard(self, batch: TrainingBatch) -> tuple[TrainingBatch, Tensor]:
        """The batch with the updated target's hidden states and logits, and those logits with their graph."""
        target = self.module.target
        output = target.through(
            target.embed(batch.tokens), batch.positions, batch.seen, self.module.hidden_layers, self.weights
        )
        assert output.logits is not None
        return replace(batch, hidden=output.hidden, scores=output.logits.detach()), output.logits

    def _own(self, batch: TrainingBatch, logits: Tensor) -> Losses:
        """The target's own loss: its logits now, against the original ones or the text, by the objective."""
        at, places = batch.ahead(1).nonzero(as_tuple=True)
        rows = (logits[at, places], batch.logits[at, places], batch.tokens[at, places + 1])
        return measure(self._own_objective, [rows], [1.0])

    @torch.no_grad()
    def accepted(self, batch: TrainingBatch) -> Tensor:
        return self.module.accepted(self._heard(batch)[0])

    @property
    def needs_calibration(self) -> bool:
        return self.module.needs_calibration

    @torch.no_grad()
    def calibrate(self, batches: Iterable[TrainingBatch]) -> None:
        self.module.calibrate(self._heard(batch)[0] for batch in batches)

    @torch.no_grad()
    def figures(self, batches: Iterable[TrainingBatch]) -> dict[str, float]:
        """Drift of the target: its own loss, and the share of places with the same best token."""
        loss, same, count = 0.0, 0, 0
        for batch in batches:
            logits = self._heard(batch)[1]
            places = batch.ahead(1)
            number = int(places.sum())
            loss += float(self._own(batch, logits).total) * number
            same += int((logits.argmax(dim=-1) == batch.logits.argmax(dim=-1))[places].sum())
            count += number
        return {"target_loss": loss / max(count, 1), "target_agreement": same / max(count, 1)}

    def save(self, folder: str | Path) -> None:
        """Write the module as if trained alone, and the updates to the subfolder ``target``."""
        self.module.save(folder)
        self._updates.save(Path(folder) / TARGET, self.weights)

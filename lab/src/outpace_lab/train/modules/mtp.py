"""Prediction layers as they learn: those of a checkpoint, fine-tuned on the target's own text.

A single layer is unrolled, so that it learns what it drafts from its own outputs: Cai et al. 2025 (FastMTP,
arXiv 2509.18362), whose decay of the depths' weights is the default. Of several layers each drafts one place,
and the text alone is what it reads (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

The result has the tensors of the checkpoint, by their names there: the drafter ``mtp`` reads it, and so does
what reads the checkpoint, once they are put back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.drafters.mtp.mtp_checkpoint import load, published
from outpace.drafters.mtp.mtp_module import MtpModule
from outpace.learned.frequent import drafted_of_tables
from outpace.learned.learned import Fit, PartialHead
from outpace.learned.vocabulary import DraftVocabulary
from outpace.spec import check_least
from outpace.targets.base import TargetModel
from outpace.targets.inputs.forward import CacheAdapter
from outpace_lab.train.trained import Losses, Objective, TrainedPart, TrainingBatch
from outpace_lab.train.unrolled import Stores, Unrolled, keeping, unroll

_TOKENS = 3  # of a chain by a single layer
_TABLE = "mtp.t2d"  # the drafted ids, in the folder


@dataclass(frozen=True)
class MtpConfig:
    """How prediction layers are trained.

    Attributes:
        path: folder or hub name of a checkpoint with the layers to begin with; empty for the target's own.
        tokens: number of depths that training unrolls; 0 is one per layer, or 3 for a single one.
        decay: weight of each depth's loss, relative to the depth before.
        draft_vocabulary: number of the target's ids that are drafted, those most frequent in the training
            text; 0 is all, or those that the checkpoint names.
    """

    path: str = ""
    tokens: int = 0
    decay: float = 0.6
    draft_vocabulary: int = 0

    def __post_init__(self) -> None:
        check_least("mtp", self, tokens=0, draft_vocabulary=0)
        if not 0 < self.decay <= 1:
            raise OutpaceError(f"mtp: decay must be above 0 and at most 1, not {self.decay}")


class TrainedMtp(TrainedPart, Unrolled):
    """Prediction layers, in training.

    Args:
        module: the layers, bound to their target.
    """

    method: ClassVar[str] = "mtp"
    config_type: ClassVar[type[MtpConfig]] = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig, fit: Fit, module: MtpModule) -> None:
        super().__init__(config, fit)
        self.layers = module.layers
        self._module = (module,)  # no child, whose layers this has
        known = drafted_of_tables(module.tables)
        size = config.draft_vocabulary or (0 if known is None else len(known))
        self.drafted = DraftVocabulary(self.method, size, fit)
        self._chooses = bool(config.draft_vocabulary)
        if known is not None and not self._chooses:
            self.drafted.choose(known)

    @property
    def module(self) -> MtpModule:
        return self._module[0]

    @property
    def drafting_part(self) -> MtpModule:
        self.module.tables = self._tables()
        return self.module

    @classmethod
    def new(cls, config: MtpConfig, target: TargetModel) -> Self:
        """The layers of a checkpoint, in float32.

        Raises:
            OutpaceError: as for the drafter; or more depths than layers are asked for, or the layers cannot
                be written in the checkpoint's form.
        """
        module = MtpModule(load(target, config.path or None), target, pack=False)
        count = len(module)
        if 1 < count < config.tokens:
            raise OutpaceError(f"mtp: tokens is at most {count}, the number of layers, not {config.tokens}")
        tokens = config.tokens or (_TOKENS if count == 1 else count)
        made = cls(dataclasses.replace(config, tokens=tokens), Fit.of(target), module).float().train()
        made.bind(target)
        made.requires_grad_(True)
        published(module.found, made._weights())  # refuses what could not be saved
        return made

    @classmethod
    def load(cls, folder: str | Path, target: TargetModel) -> Self:
        made = cls.new(MtpConfig(path=str(folder)), target)
        return made.requires_grad_(False).eval().to(target.hidden.dtype)

    def saved(self) -> dict[str, Tensor]:
        """The layers in the form of their checkpoint."""
        return {**published(self.module.found, self._weights()), **self._tables()}

    def _weights(self) -> dict[str, Tensor]:
        return {f"layers.{name}": tensor for name, tensor in self.layers.state_dict().items()}

    def _tables(self) -> dict[str, Tensor]:
        if self.drafted.part is None:
            return {}
        mask = torch.zeros(self.fit.vocabulary, dtype=torch.bool)
        return {_TABLE: mask.index_fill(0, self.drafted.part.cpu(), True)}

    # -- losses ------------------------------------------------------------------------------------------

    @property
    def ids(self) -> Tensor | None:
        return self.drafted.part

    @property
    def targets_head(self) -> PartialHead:
        return self.drafted.head(self.target)

    def drafted_logits(self, states: Tensor) -> Tensor:
        return self.targets_head(states)

    def loss(self, batch: TrainingBatch, objective: Objective) -> Losses:
        outputs = list(self.unroll(batch, self.config.tokens))
        weights = [self.config.decay**depth for depth in range(self.config.tokens)]
        return self.measured(batch, objective, outputs, weights)

    def unroll(self, batch: TrainingBatch, steps: int) -> Iterator[Tensor]:
        states = batch.hidden[-1][:, :-1].to(next(self.layers.parameters()).dtype)
        if len(self.layers) > 1:
            return self._in_turn(batch, states, steps)
        return unroll(batch, states, steps, 1, partial(self._layer, batch, 0))

    def _in_turn(self, batch: TrainingBatch, states: Tensor, steps: int) -> Iterator[Tensor]:
        """Outputs of several layers: layer j's row of place s + j is row s of depth j."""
        positions, stores, given = batch.positions[:, :-1], keeping(len(self.layers)), states
        for layer in range(steps):
            if layer:  # what the row before gave
                given = F.pad(given[:, :-1], (0, 0, 1, 0))
            there = (positions >= layer)[:, None, None]  # the first rows of a text have nothing to read
            mask = batch.seen[:, None, :-1, :-1] & there
            made = self._layer(batch, layer, batch.tokens[:, 1:], given, positions, mask, stores)
            yield made.roll(-layer, dims=1)
            given = made if self.module.found.chained else given

    def _layer(
        self,
        batch: TrainingBatch,
        layer: int,
        tokens: Tensor,
        given: Tensor,
        positions: Tensor,
        mask: Tensor,
        stores: Stores,
    ) -> Tensor:
        """Apply a layer to rows; the arguments behind ``layer`` are those of ``unroll``'s ``advance``."""
        if (window := self.module.window(layer)) is not None:
            # Columns are those of packed texts, which ``MtpModule`` does not know.
            near = batch.positions[:, None, None, :-1] > positions[:, None, :, None] - window
            mask = mask & F.pad(near, (0, mask.shape[-1] - near.shape[-1]), value=True)
        columns: Any = _Columns(stores, mask.shape[-1], mask.shape[-2])
        cache = CacheAdapter(columns, {layer: layer})
        embedded = self.target.embed(tokens).to(given)
        return self.module.apply_layer(layer, embedded, given, positions + 1, mask, cache)


@dataclass(frozen=True)
class _Columns:
    """What a layer's rows attend to, in the place of a cache's window."""

    stores: Stores
    columns: int
    width: int

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.stores(layer)(keys, values)

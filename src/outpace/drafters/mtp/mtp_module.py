"""Prediction layers as a drafter runs them: over trees, for many sequences at once.

Layer k's row of the token at place t reads what layer k - 1 gave at place t - 1, for the first layer the
target's state, and predicts the token at place t + 1. So the first k rows of a text have nothing to read in
layer k, and are hidden from the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outpace.cache import LayerShape
from outpace.core import UnsupportedModel
from outpace.drafters.mtp.mtp_checkpoint import Found, load
from outpace.drafters.support.layer_cache import Forward
from outpace.targets.base import TargetModel
from outpace.targets.cpu.linear import pack_drafter
from outpace.targets.inputs.config import CACHE, family
from outpace.targets.inputs.forward import CacheAdapter
from outpace.targets.inputs.probe import Probe


class MtpModule(nn.Module):
    """A target's prediction layers.

    Args:
        target: it lends its embeddings and its head.
        pack: pack the weights for drafting on a CPU (``pack_drafter``), after which they cannot be trained.

    Attributes:
        tables: of the drafted ids, by name; empty for all.
        shapes: of each layer's keys and values.
    """

    def __init__(self, found: Found, target: TargetModel, pack: bool = True) -> None:
        super().__init__()
        self.layers = found.layers
        self.found = found
        self.tables = found.tables
        self._target = target
        if pack and target.hidden.device.type == "cpu":
            pack_drafter(self.layers)
        self.shapes = self._probe()

    @classmethod
    def of(cls, path: Any, target: TargetModel) -> MtpModule:
        """The layers in a folder, or in that of the target's checkpoint; see ``load``."""
        return cls(load(target, path), target)

    def __len__(self) -> int:
        return len(self.layers)

    def committed(self, states: Tensor, before: Tensor) -> Tensor:
        """What rows of committed places read, [w, layers + 1, hidden size], in the form of outputs.

        Args:
            states: the target's, [w, hidden size].
            before: the output of the row before them, [1, layers + 1, hidden size]; [0] for none.
        """
        read = states.new_zeros(len(states), len(self) + 1, states.shape[-1])
        if len(before):
            read[0, 1:] = before[0, :-1]
        read[:, 0] = states
        return read

    def run(self, forward: Forward, tokens: Tensor, read: Tensor, depth: int) -> Tensor:
        """Outputs of a forward's rows, [S, width, layers + 1, hidden size].

        The first ones are what the rows after them read in each layer, the last one is the input of the
        target's head.

        Args:
            tokens: [S, width].
            read: as ``committed`` returns, or the outputs of the rows' parents.
            depth: of the rows in a draft, in which layers before this depth have nothing to read; or 0.
        """
        count = len(self)
        first = min(depth, count - 1)
        cache = CacheAdapter(forward.window, {layer: layer for layer in range(count)})
        embedded = self._target.embed(tokens).to(read)
        outputs = torch.zeros_like(read)
        for layer in range(first, count):
            if depth:  # what the layer before gave the parent, or a single layer itself
                given = read[:, :, max(layer - 1, 0)]
            elif layer:
                given = torch.cat([read[:, :1, layer], outputs[:, :-1, layer - 1]], dim=1)
            else:
                given = read[:, :, 0]
            made = self.apply_layer(layer, embedded, given, forward.positions + 1, forward.mask, cache)
            outputs[:, :, layer] = made if self.found.chained or count == 1 else given
            if layer == first:
                outputs[:, :, -1] = made
        return outputs

    def apply_layer(
        self, layer: int, embedded: Tensor, given: Tensor, positions: Tensor, mask: Tensor, cache: Any
    ) -> Tensor:
        """Apply a layer to rows [S, width, hidden size].

        Args:
            given: what the layer before gave, or the target.
            positions: of the tokens, [S, width].
            mask: [S, 1, width, columns], true where a row attends to a column.
        """
        kind, window = self._kind(layer), self.window(layer)
        columns = torch.arange(mask.shape[-1], device=mask.device)
        seen = mask & (columns >= layer)
        if window is not None:
            # A column of the text is that of the token at the next place; those of a draft are near.
            seen = seen & (columns + 1 > positions[:, None, :, None] - window)
        seen = seen | (~seen.any(-1, keepdim=True) & (columns == 0))  # so that a softmax is defined
        by_kind = {"layer_type": kind} if self.found.by_kind else {}
        rotary = self.found.rotary
        out: Tensor = self.layers[layer](
            embedded,
            given,
            position_embeddings=rotary and rotary(embedded, position_ids=positions, **by_kind),
            attention_mask=embedded.new_zeros(seen.shape).masked_fill_(
                ~seen, torch.finfo(embedded.dtype).min
            ),
            position_ids=positions,
            **{CACHE: cache},
        )
        return out

    def _kind(self, layer: int) -> str:
        """The kind of a layer's attention; empty if the config names none."""
        kinds = getattr(self.found.config, "layer_types", None) or [""] * len(self)
        return str(kinds[layer])

    def window(self, layer: int) -> int | None:
        """How many places before it a row of a layer attends to; None for all."""
        config = self.found.config
        if self._kind(layer) != "sliding_attention":
            return None
        sized = config.per_layer_config[layer] if config.is_heterogeneous else config
        return int(sized.sliding_window)

    @torch.inference_mode()
    def _probe(self) -> list[LayerShape]:
        """The shapes of keys and values, by a forward of one row."""
        probe, hidden = Probe(), self._target.hidden
        row = torch.zeros(1, 1, hidden.size, dtype=hidden.dtype, device=hidden.device)
        ones = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden.device)
        for layer in range(len(self)):
            self.apply_layer(layer, row, row, ones[0, 0].long(), ones, probe)
        shapes = probe.shapes
        if sorted(shapes) != list(range(len(self))):
            raise UnsupportedModel(
                f"{family(self._target.model)}: its prediction layers keep no keys and values"
            )
        return list(shapes.values())

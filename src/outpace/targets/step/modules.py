"""The modules that a target's steps run on: a transformers model, or a copy of it with replaced layers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outpace.cache import StateShape, Window
from outpace.core import UnsupportedModel
from outpace.targets.batch import Batch
from outpace.targets.cpu.flat_attention import FLAT
from outpace.targets.cpu.linear import Packer, release
from outpace.targets.cpu.rounding import Rounding
from outpace.targets.gpu.fixed import WIDEST
from outpace.targets.gpu.graphs import Made
from outpace.targets.gpu.tree_attention import with_trees
from outpace.targets.inputs.changes import Structure, WatchedWeights
from outpace.targets.inputs.config import cache_argument, family
from outpace.targets.inputs.forward import CacheAdapter, device_of, inputs_of, rows_of
from outpace.targets.inputs.masks import Mask, MaskMaker, NoMasks
from outpace.targets.inputs.probe import Probe, probed
from outpace.targets.inputs.refusals import attends
from outpace.targets.inputs.states import Key, StateProbe, has_states
from outpace.targets.inputs.surgery import exchange, keep_layers
from outpace.targets.native.rounding import NativeRounding
from outpace.targets.native.runner import NativeRunner
from outpace.tree import is_chain


class Modules:
    """A model as steps run it.

    Args:
        model: a loaded model, which stays unchanged.
        step: the module that a step runs; ``model`` if nothing is replaced.
        held: the model's modules of whose weights the step has copies, or these very tensors.
        packer: what packed its linear layers, if anything did.
        row_step: the rows of a forward are padded to a multiple of this.
        chains: leave masks and positions to the model.
        native: computes forwards instead of ``step``.

    Attributes:
        trees: the same with another attention, for forwards with branches (``step/trees.py``); None if there
            is none.
        flat: the same with another attention, for flat forwards (``step/flat.py``); None if there is none.
        packed: name of a kernel -> number of layers that use it.
        masks, model_masks: makers of the masks of ``step`` and of ``model``.
        cache_layers: layer of the model -> layer of the cache.
        shapes: shapes of the rows of the cache's layers.
        states: shape of each state of recurrent layers, and ``grid``, see ``StateProbe``.
        vocabulary: number of logits of a row.
        cache_argument: name of the argument of ``step`` for a cache.
        keeps_logits: ``step`` takes the rows whose logits are needed.
        structure: detector of other modules in ``model``.

    Raises:
        UnsupportedModel: the model takes no masks, positions or cache of outpace's.
    """

    def __init__(
        self,
        model: Any,
        step: Any,
        held: Sequence[nn.Module] = (),
        packer: Packer | None = None,
        row_step: int = 1,
        chains: bool = False,
        native: NativeRunner | None = None,
    ) -> None:
        self.model = model
        self.step: Any = step
        self.trees: Modules | None = None
        self.flat: Modules | None = None
        self.states: dict[Key, StateShape] = {}
        self.grid = 0
        self.native = native
        self.packed = {} if packer is None else dict(packer.kernels)
        if native is not None:
            held, self.packed = native.weights.held, dict(native.weights.kernels)
        self.row_step = row_step
        self.cache_argument = cache_argument(model)
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._packer = packer
        self._held = held
        self._weights = WatchedWeights(held)
        self.structure = Structure(model)
        stateful, config = has_states(model), model.config.get_text_config(decoder=True)
        self._probe_of: type[Probe] = StateProbe if stateful else Probe
        self._unmasked = chains or (stateful and not attends(config))
        self.masks, self.model_masks = (
            NoMasks()
            if self._unmasked
            else MaskMaker(owner.config.get_text_config(decoder=True), owner.dtype, stateful)
            for owner in (step, model)
        )
        self._probe()
        self.model_masks.by_kind = self.masks.by_kind

    def changed(self, thorough: bool) -> bool:
        """True if weights that steps hold were modified or replaced; see ``WatchedWeights.changed``."""
        return self._weights.changed(thorough)

    def live(self) -> list[nn.Module]:
        """The model's modules whose weights steps read from them, without those that a hook brings."""
        held = set(self._held)
        return [
            module for module in self.model.modules() if module not in held and "forward" not in vars(module)
        ]

    def release(self) -> bool:
        """Free the weights of which steps use copies.

        Returns:
            True if there were some.
        """
        head = self.model.get_output_embeddings()  # drafters use it, and it may be the embeddings
        source = self._packer if self.native is None else self.native.weights
        doubled = () if source is None else source.doubled
        found = [layer for layer in doubled if layer is not head]
        release(found)
        self._weights = WatchedWeights(self._held)
        return bool(found)

    def some_layers(self, layers: Sequence[int], bare: bool) -> Modules:
        """The same with a subset of the layers; see ``keep_layers``.

        Raises:
            UnsupportedModel: the model is not a plain stack of layers, or runs others than these.
        """
        part = copy.copy(self)
        part.model = keep_layers(self.model, layers, bare)
        part.step = part.model if self.step is self.model else keep_layers(self.step, layers, bare)
        part.trees, part.flat = self.trees and self.trees.some_layers(layers, bare), None
        part.native = self.native and self.native.some_layers(layers, bare)
        probe, _ = part._first_token()
        if list(probe.shapes) != list(layers):  # if accelerate has replaced a module's forward, for example
            raise UnsupportedModel(
                f"{family(self.model)} runs layers {list(probe.shapes)} when asked for {list(layers)}; load "
                "it on one device without device_map, or use another drafter"
            )
        return part

    def over_window(self, sinks: int, recent: int) -> Modules:
        """The same with masks that hide committed rows; see ``MaskMaker.over_window``."""
        part = copy.copy(self)
        part.trees = part.flat = None
        part.masks = self.masks.over_window(sinks, recent)
        part.native = self.native and self.native.over_window(sinks, recent)
        return part

    def rounding(self, bits: int) -> Rounding | NativeRounding:
        """How the linear layers of the step are rounded."""
        return Rounding(self.step, bits) if self.native is None else NativeRounding(self.native, bits)

    def rounded(self, rounding: Rounding | NativeRounding) -> Modules:
        """The same with rounded linear layers. Who uses it follows changes of the weights."""
        part = copy.copy(self)
        part._weights, part.row_step = WatchedWeights(()), 1
        part.trees = part.flat = None
        if isinstance(rounding, NativeRounding):
            part.native = rounding.made()
        else:
            part.step = rounding.made()
        return part

    def with_native(self, runner: NativeRunner) -> Modules:
        """The same with another native runner."""
        part = copy.copy(self)
        part.native = runner
        return part

    def with_trees(self) -> Modules:
        """The same, on ``tree_attention``.

        Raises:
            UnsupportedModel: its attention cannot be replaced.
        """
        return Modules(self.model, with_trees(self.step))

    def with_flat(self) -> Modules | None:
        """The same, on flat attention; None if that has no form of its own."""
        attention = FLAT.get(self.step.config.get_text_config(decoder=True)._attn_implementation)
        if attention is None or self._unmasked:
            return None
        part = copy.copy(self)
        part.step = exchange(self.step, lambda _: None, attention)
        return part

    def over(self, batch: Batch) -> Modules:
        """The modules for a forward: those for trees if rows branch, and none are a chunk of a prompt."""
        if self.trees is None or batch.widths.max() > WIDEST:
            return self
        branch = not all(is_chain(rows.tree) for rows in batch.rows.values())
        return self.trees if branch else self

    def inputs(self, window: Window, batch: Batch, device: torch.device) -> tuple[Tensor, Mask]:
        """Tokens and positions of a window's rows, padded, [2, B, width], and their mask on a device."""
        rows = rows_of(window, batch.rows)
        tokens, positions = inputs_of(rows, window)
        # One tensor for both, for a single copy to the device. NumPy reads lists four times as fast as torch.
        both = torch.from_numpy(np.array([tokens, positions]))
        return both, self.masks(rows, window, positions, device)

    def run(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        mask: Mask,
        positions: Tensor,
        cache: CacheAdapter,
        wanted: int | Tensor,
        hidden_layers: Sequence[int],
    ) -> Made:
        """Run the step.

        Args:
            wanted: numbers of rows, or how many of the last ones, whose logits are wanted.

        Returns:
            Logits of these rows; for a number, of at least the last N.
        """
        read: int | slice | Tensor = wanted
        if not isinstance(wanted, Tensor) and not wanted:  # for transformers, 0 means all
            read = slice(0) if hidden_layers else 1  # some models are quicker with a number
        more: dict[str, Any] = {self.cache_argument: cache}
        if self.keeps_logits:
            more["logits_to_keep"] = read
        if hidden_layers:
            more["output_hidden_states"] = True
        with cache.context.running():
            output = model(**inputs, use_cache=True, **self.mask_arguments(mask, positions), **more)
        logits = output.logits
        if isinstance(wanted, Tensor) and not self.keeps_logits:
            logits = logits[:, wanted]
        # Layers may be on several devices; who reads them is given all on the one of the tokens.
        device = next(iter(inputs.values())).device
        return Made(logits, {layer: output.hidden_states[layer].to(device) for layer in hidden_layers})

    def mask_arguments(self, mask: Mask, positions: Tensor) -> dict[str, Any]:
        """Arguments of the step for the rows' mask and positions."""
        return {} if self._unmasked else {"attention_mask": mask, "position_ids": positions}

    @torch.inference_mode()
    def _first_token(self, step: Any = None) -> tuple[Probe, Any]:
        """The rows, and the output, of the step, or of a part of it, for a token without a cache."""
        token, step = self._some_token(), self.step if step is None else step
        probe = self._probe_of()
        with probe.context.running():
            output = step(
                input_ids=token,
                use_cache=True,
                **self.mask_arguments(self.masks.token_mask(token.device), token),
                **{self.cache_argument: probe},
            )
        return probe, output

    def _some_token(self) -> Tensor:
        return torch.zeros((1, 1), dtype=torch.long, device=device_of(self.model.get_input_embeddings()))

    @torch.inference_mode()
    def _probe(self) -> None:
        """Determine the model's form of mask, the shape of each layer's rows, and the vocabulary.

        Layers that are computed in C have rows of one shape, so the first one shows it.
        """
        step, alike = self.step, False
        if self.native is not None:
            with suppress(UnsupportedModel):  # it is not a plain stack, as GPT-NeoX is not
                step, alike = keep_layers(self.step, [0], bare=True), True

        def run() -> tuple[Probe, Any]:
            try:
                return self._first_token(step)
            except UnsupportedModel:
                raise
            except Exception:
                if not (self.masks.by_kind and self.masks.kinds == 1):
                    raise
                self.masks.by_kind = False
                return self._first_token(step)

        taken = "a 4-D mask, positions and a cache object"
        probe, output = probed(self.model, taken, run, lambda: self.model(input_ids=self._some_token()))
        self.cache_layers, self.shapes = probe.layout(self.model)
        if isinstance(probe, StateProbe):
            self.states, self.grid = probe.states, probe.grid
        self.vocabulary: int = output.logits.shape[-1]
        if alike and self.native is not None:
            self.cache_layers = {layer: layer for layer in self.native.layers}
            self.shapes, self.vocabulary = self.shapes * len(self.cache_layers), self.native.vocabulary

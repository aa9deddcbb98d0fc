"""The modules that a target's steps run on: a transformers model, or a copy of it with replaced layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel
from outpace.targets.cpu.exact_attention import EXACT
from outpace.targets.cpu.fused import fuse_layers, fused_linears, norms_of
from outpace.targets.cpu.linear import Packer, piecewise, release, tail_step
from outpace.targets.gpu.invariant import TRITON, invariant_norm
from outpace.targets.inputs.changes import Structure, Weights
from outpace.targets.inputs.config import cache_argument, family, runs_on_gpu
from outpace.targets.inputs.forward import Probe, device_of
from outpace.targets.inputs.masks import INVARIANT, Mask, MaskMaker, OwnMasks
from outpace.targets.inputs.refusals import refuse_unprobed
from outpace.targets.inputs.surgery import exchange, keep_layers
from outpace.targets.kernel import Kernel


class Modules:
    """A model as steps run it.

    Args:
        model: a loaded model, which stays unchanged.
        packs: pack the weights of linear layers; or the kernel to pack them for.
        exact: pad rows, and attend, so that a row's bits do not depend on the other rows.
        fuses: fuse the layers' operations between matrix products.
        quantise: round the weights of linear layers; empty for none.
        chains: leave masks and positions to the model.

    Attributes:
        step: the module that a step runs; ``model`` if nothing is replaced.
        line: the module for rows in a line; None if there is none, or none was tried.
        packed: name of a kernel -> number of layers that use it.
        row_step: the rows of a forward are padded to a multiple of this.
        least_rows: forwards of fewer rows take no less time than this number.
        masks, own_masks: makers of the masks of ``step`` and of ``model``.
        places: layer of the model -> layer of the cache.
        shapes: shapes of the rows of the cache's layers.
        vocabulary: number of logits of a row.
        cache_argument: name of the argument of ``step`` for a cache.
        structure: detector of other modules in ``model``.

    Raises:
        UnsupportedModel: the model takes no masks, positions or cache of outpace's.
    """

    def __init__(
        self,
        model: Any,
        packs: bool | Kernel,
        exact: bool,
        fuses: bool,
        quantise: str,
        chains: bool = False,
    ) -> None:
        invariant = exact and runs_on_gpu(model)
        kernel = TRITON if invariant else None if isinstance(packs, bool) else packs
        apart = fused_linears(model) if fuses else ()
        packer = Packer(model, bool(packs), exact, quantise, apart, kernel)
        held: list[nn.Module] = []

        def replaced(module: nn.Module) -> nn.Module | None:
            found = packer(module) or (invariant_norm(module, model.dtype) if invariant else None)
            if found is not None:  # whatever its kernel, it has a copy of the weights, or these very tensors
                held.append(module)
            return found or (piecewise(module) if exact and not invariant else None)

        changed = model
        if invariant or packs or exact or quantise or fuses:
            # A fused layer runs no attention but its own; its masks are those of the exact one.
            attention = INVARIANT if invariant else EXACT if exact or fuses else None
            changed = exchange(model, replaced, attention)
        if fuses:
            fuse_layers(model, changed, packer.join)
            held += [*apart, *norms_of(model)]
        self.model = model
        self.packed = dict(packer.kernels)
        self.step: Any = changed if exact or self.packed or fuses else model
        self.line: Any = None
        self.cache_argument = cache_argument(model)
        self.row_step = tail_step(model) if exact and not (fuses or invariant) else 1
        self.least_rows = packer.rows if fuses else 1
        self._packer = packer
        self._held = held
        self._weights = Weights(held)
        self.structure = Structure(model)
        self._chains = chains
        self.masks, self.own_masks = (
            OwnMasks()
            if chains
            else MaskMaker(own.config.get_text_config(decoder=True), own.dtype, fuses and own is self.step)
            for own in (self.step, model)
        )
        self._probe()
        self.own_masks.by_kind = self.masks.by_kind

    def changed(self, thorough: bool) -> bool:
        """True if weights that steps hold were modified or replaced; see ``Weights.changed``."""
        return self._weights.changed(thorough)

    def live(self) -> list[nn.Module]:
        """The model's modules whose weights steps read from them, without those that a hook brings."""
        held = set(self._held)
        return [one for one in self.model.modules() if one not in held and "forward" not in vars(one)]

    def release(self) -> bool:
        """Free the weights of which steps use copies.

        Returns:
            True if there were some.
        """
        head = self.model.get_output_embeddings()  # drafters use it, and it may be the embeddings
        found = [layer for layer in self._packer.doubled if layer is not head]
        release(found)
        self._weights = Weights(self._held)
        return bool(found)

    def some_layers(self, layers: Sequence[int], bare: bool) -> Modules:
        """The same with a subset of the layers; see ``keep_layers``.

        Raises:
            UnsupportedModel: the model is not a plain stack of layers, or runs others than these.
        """
        part = copy.copy(self)
        part.line = None
        part.model = keep_layers(self.model, layers, bare)
        part.step = part.model if self.step is self.model else keep_layers(self.step, layers, bare)
        probe = Probe()
        part._first_token(probe)
        if list(probe.shapes) != list(layers):  # if accelerate has replaced a module's forward, for example
            raise UnsupportedModel(
                f"{family(self.model)} runs layers {list(probe.shapes)} when asked for {list(layers)}; load "
                "it on one device without device_map, or use another drafter"
            )
        return part

    def over_window(self, sinks: int, recent: int) -> Modules:
        """The same with masks that hide committed rows; see ``MaskMaker.over_window``."""
        part = copy.copy(self)
        part.line = None
        part.masks = self.masks.over_window(sinks, recent)
        return part

    def placing(self, mask: Mask, positions: Tensor) -> dict[str, Any]:
        """Arguments of the step for the rows' mask and positions."""
        return {} if self._chains else {"attention_mask": mask, "position_ids": positions}

    @torch.inference_mode()
    def _first_token(self, probe: Probe) -> Any:
        """The step's output for a token without a cache."""
        device = device_of(self.model.get_input_embeddings())
        token = torch.zeros((1, 1), dtype=torch.long, device=device)
        return self.step(
            input_ids=token,
            use_cache=True,
            **self.placing(self.masks.one(device), token),
            **{self.cache_argument: probe},
        )

    @torch.inference_mode()
    def _probe(self) -> None:
        """Determine the model's form of mask, the shape of each layer's rows, and the vocabulary."""
        while True:
            probe = Probe()
            try:
                output = self._first_token(probe)
                break
            except UnsupportedModel:
                raise  # it names the reason itself
            except Exception as error:
                if self.masks.by_kind and self.masks.kinds == 1:
                    self.masks.by_kind = False
                    continue
                device = device_of(self.model.get_input_embeddings())
                token = torch.zeros((1, 1), dtype=torch.long, device=device)
                taken = "a 4-D mask, positions and a cache object"
                refuse_unprobed(self.model, taken, error, partial(self.model, input_ids=token))
        if not probe.rows:
            raise UnsupportedModel(
                f"{family(self.model)} does not keep its keys and values in the cache it is given"
            )
        self.places = {layer: place for place, layer in enumerate(probe.shapes)}
        self.shapes = list(probe.shapes.values())
        self.vocabulary: int = output.logits.shape[-1]

"""Stock decoder-only transformers models: their forward and their cache.

Nothing is patched: a forward gets a 4-D mask, explicit positions and a cache object of ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from outpace.cache import KVCache, LayerShape, RowShape
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.base import Output, Rows, TargetModel, Wanted
from outpace.targets.checks import context_of, family, refuse_by_config, self_test
from outpace.targets.masks import MaskMaker
from outpace.tree import depths

_NOTHING = Rows(())


class CacheAdapter(Cache):
    """Shows a forward of a KVCache to a model as transformers' cache.

    Args:
        places: layer of the model -> layer of the store. (Layers that share another's keys have none.)
        columns: rows that attention sees, those of this forward included.
    """

    def __init__(self, store: KVCache, places: dict[int, int], columns: int, width: int) -> None:
        super().__init__(layers=[])
        self._store = store
        self._places = places
        self._columns = columns
        self._width = width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._store.append(self._places[layer_idx], key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._columns - self._width

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        return self._columns, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    # The name of get_max_length before transformers 5.23.
    get_max_cache_shape = get_max_length

    @property
    def is_initialized(self) -> bool:
        return True


class _Probe(CacheAdapter):
    """Records the shape of each layer's rows, and hands them back: a first token without a cache."""

    def __init__(self) -> None:
        Cache.__init__(self, layers=[])
        self._columns = self._width = 1
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        shapes = [RowShape(s.shape[1], s.shape[3], s.dtype, s.device) for s in (key_states, value_states)]
        self.shapes[layer_idx] = LayerShape(*shapes)
        return key_states, value_states


class CausalTarget(TargetModel):
    """A decoder-only transformers model.

    Construction runs a few forwards over about twenty tokens: they show the shape of the cache, and that a
    tree gives the logits of its paths. The model is used as it is and left as it is.

    Args:
        model: loaded, in evaluation mode, on one device or spread over several.
        static: fixed shapes, for compiled steps: every forward has a row for each slot of the cache, a width
            that is a power of two, and the whole length of the cache. The cache then does not grow.
        check: run the self-test. Turn it off only for a model it has passed on.

    Raises:
        UnsupportedModel: named by family, with the reason.
    """

    def __init__(self, model: PreTrainedModel, static: bool = False, check: bool = True) -> None:
        refuse_by_config(model)
        self.model = model
        self.static = static
        config = model.config.get_text_config(decoder=True)
        self.context = context_of(config)
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
        if eos is None:
            eos = config.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        self._keep_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._masks = MaskMaker(config, model.dtype)
        self.device = _input_device(model)
        self._probe()
        if check:
            self_test(self, model, self.device)

    def new_cache(self, slots: int = 1, length: int = 256) -> KVCache:
        return KVCache(self._layers, slots, length, static=self.static)

    @torch.inference_mode()
    def forward(
        self,
        cache: KVCache,
        rows: Sequence[Rows],
        first: int = 0,
        wanted: Wanted = "all",
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        if self.model.training:
            raise OutpaceError(f"{family(self.model)} is in training mode; call model.eval()")
        widths = [len(row.tokens) for row in rows]
        window = cache.begin(widths, first, pad_to=_bucket(max(widths)) if self.static else 0)
        before, after = first - window.start, window.stop - first - len(rows)
        covered = [_NOTHING] * before + list(rows) + [_NOTHING] * after
        tokens = [[*row.tokens, *[0] * (window.width - len(row.tokens))] for row in covered]
        positions = [
            _positions(row, offset, window.width) for row, offset in zip(covered, window.offsets, strict=True)
        ]
        # One tensor for both: one copy to the device.
        ids, places = torch.tensor([tokens, positions], device=self.device).unbind()
        more: dict[str, Any] = {"logits_to_keep": 1} if wanted == "none" and self._keep_logits else {}
        if hidden_layers:
            more["output_hidden_states"] = True
        output = self.model(
            input_ids=ids,
            attention_mask=self._masks(covered, window, positions, self.device),
            position_ids=places,
            past_key_values=CacheAdapter(cache, self._places, window.columns, window.width),
            use_cache=True,
            **more,
        )
        asked = slice(before, before + len(rows))
        hidden = {layer: output.hidden_states[layer][asked] for layer in hidden_layers}
        if wanted == "none":
            return Output(None, hidden)
        logits = output.logits[asked]
        # Draws are made in float64, which MPS lacks.
        return Output(logits.cpu() if logits.device.type == "mps" else logits, hidden)

    @torch.inference_mode()
    def _probe(self) -> None:
        """Find which form of mask the model takes, the shape of each layer's rows, and the vocabulary."""
        token = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        while True:
            probe = _Probe()
            try:
                output = self.model(
                    input_ids=token,
                    attention_mask=self._masks.one(self.device),
                    position_ids=token,
                    past_key_values=probe,
                    use_cache=True,
                )
                break
            except Exception as error:
                if self._masks.by_kind and self._masks.kinds == 1:
                    self._masks.by_kind = False
                    continue
                self.model(input_ids=token)  # what fails without us is not the family's fault
                raise UnsupportedModel(
                    f"{family(self.model)} does not take a 4-D mask, positions and a cache object: {error!r}"
                ) from error
        if not probe.shapes:
            raise UnsupportedModel(
                f"{family(self.model)} does not keep its keys and values in the cache it is given"
            )
        self._places = {layer: place for place, layer in enumerate(sorted(probe.shapes))}
        self._layers = [probe.shapes[layer] for layer in self._places]
        self.vocabulary = output.logits.shape[-1]


def _input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go in."""
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type == "meta":  # offloaded: accelerate's hook brings the weights to this device
        device = torch.device(embeddings._hf_hook.execution_device)
    return device


def _positions(row: Rows, offset: int, width: int) -> list[int]:
    """Position of each row: committed length + depth. Padding repeats the last one, a legal position."""
    size = len(row.tokens)
    places = range(size) if row.parents is None else depths(row.parents)
    positions = [offset + depth for depth in places]
    return positions + [positions[-1] if positions else 0] * (width - size)


def _bucket(width: int) -> int:
    """The power of two at or above a width."""
    return 1 << max(width - 1, 0).bit_length()

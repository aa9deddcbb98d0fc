"""Stock decoder-only transformers models: the only file that knows transformers' forward and cache.

Nothing is patched: a forward gets a 4-D mask, explicit positions and a cache object of ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from outpace.cache import KVCache, LayerShape, RowShape
from outpace.core import UnsupportedModel
from outpace.targets.base import Output, Rows, TargetModel, Wanted
from outpace.targets.masks import MaskMaker
from outpace.tree import depths

# Under these the longest position in a forward decides the rope of all its rows, past the original length.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class CacheAdapter(Cache):
    """Shows a KVCache to a model as transformers' cache."""

    def __init__(self, store: KVCache) -> None:
        super().__init__(layers=[])
        self._store = store

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._store.append(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._store.lengths, default=0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    # The name of get_max_length before transformers 5.23.
    get_max_cache_shape = get_max_length

    @property
    def is_initialized(self) -> bool:
        return True


class _Probe(Cache):
    """Records the shape of each layer's rows, and hands them back: a first chunk without a cache."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        shapes = [RowShape(s.shape[1], s.shape[3], s.dtype, s.device) for s in (key_states, value_states)]
        self.shapes[layer_idx] = LayerShape(*shapes)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length


class CausalTarget(TargetModel):
    """A decoder-only transformers model.

    Args:
        model: loaded; it is used as it is, and put in evaluation mode.
        static: fixed shapes (slots x bucketed width x length), for compiled steps.
        check: run the self-test (a tree against its paths). Turn it off only for a model it has passed on.

    Raises:
        UnsupportedModel: named by family, with the reason.
    """

    def __init__(self, model: PreTrainedModel, static: bool = False, check: bool = True) -> None:
        _refuse_by_config(model)
        self.model = model.eval()
        self.static = static
        config = model.config.get_text_config(decoder=True)
        self._config = config
        self.vocabulary = model.get_output_embeddings().weight.shape[0]
        self.context = _context(config)
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
        if eos is None:
            eos = config.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        accepted = inspect.signature(model.forward).parameters
        self._keep_logits = "logits_to_keep" in accepted
        if "position_ids" not in accepted:
            raise UnsupportedModel(f"{_family(model)} takes no position_ids, so a tree cannot be placed")
        self._masks = MaskMaker(config, model.dtype)
        self._layers = self._probe()
        if check:
            self._self_test()

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

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
        widths = [len(row.tokens) for row in rows]
        window = cache.begin(widths, first, pad_to=_bucket(max(widths)) if self.static else 0)
        tokens = [[*row.tokens, *[0] * (window.width - len(row.tokens))] for row in rows]
        positions = [
            _positions(row, offset, window.width) for row, offset in zip(rows, window.offsets, strict=True)
        ]
        more: dict[str, Any] = {"logits_to_keep": 1} if wanted == "none" and self._keep_logits else {}
        if hidden_layers:
            more["output_hidden_states"] = True
        output = self.model(
            input_ids=torch.tensor(tokens, device=self.device),
            attention_mask=self._masks(rows, window, positions, self.device),
            position_ids=torch.tensor(positions, device=self.device),
            past_key_values=CacheAdapter(cache),
            use_cache=True,
            **more,
        )
        hidden = {layer: output.hidden_states[layer] for layer in hidden_layers}
        return Output(output.logits if wanted == "all" else None, hidden)

    @torch.inference_mode()
    def _probe(self) -> list[LayerShape]:
        """The shape of each layer's rows, from a forward over one token."""
        probe = _Probe()
        try:
            self.model(
                input_ids=torch.zeros((1, 1), dtype=torch.long, device=self.device),
                attention_mask=self._masks.one(self.device),
                position_ids=torch.zeros((1, 1), dtype=torch.long, device=self.device),
                past_key_values=probe,
                use_cache=True,
            )
        except Exception as error:
            raise UnsupportedModel(
                f"{_family(self.model)} does not take a 4-D mask, positions and a cache object: {error}"
            ) from error
        if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
            raise UnsupportedModel(
                f"{_family(self.model)} does not keep its keys and values in the cache it is given"
            )
        return [probe.shapes[layer] for layer in range(len(probe.shapes))]

    @torch.inference_mode()
    def _self_test(self) -> None:
        """A six-node tree, beside a sequence of another length, against its paths decoded one by one."""
        prompts = [_tokens(5, self.vocabulary), _tokens(3, self.vocabulary, start=7)]
        tree = Rows(_tokens(7, self.vocabulary, start=20), [-1, 0, 0, 1, 1, 2, 4])
        beside = Rows(_tokens(2, self.vocabulary, start=40))
        cache = self.new_cache(slots=2, length=64)
        for place, prompt in enumerate(prompts):
            cache.allocate()
            self.forward(cache, [Rows(prompt)], first=place, wanted="none")
            cache.keep([range(len(prompt))])
        found = self.forward(cache, [tree, beside]).logits
        assert found is not None
        for place, row in ((0, tree), (1, beside)):
            for node in range(len(row.tokens)):
                text = [*prompts[place], *(row.tokens[i] for i in _row_path(row, node))]
                stock = self.model(input_ids=torch.tensor([text], device=self.device)).logits[0, -1]
                self._compare(found[place, node].float(), stock.float())

    def _compare(self, found: Tensor, stock: Tensor) -> None:
        """Refuse the family if a tree's row differs from plain decoding by more than rounding."""
        # Rounding is well below this share of the spread of a row's logits, a wrong mask well above it.
        allowed = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 0.1
        difference = (found - stock.to(found.device)).abs().max() / stock.std().clamp(min=1e-12)
        if not difference <= allowed:
            raise UnsupportedModel(
                f"{_family(self.model)} gives other logits for a tree of tokens than for its paths "
                f"(off by {float(difference):.2g} of their spread): it does not honour a 4-D mask or positions"
            )


def _family(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def _refuse_by_config(model: PreTrainedModel) -> None:
    """Refuse what is known to be wrong before any forward."""
    family = _family(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{family} is an encoder-decoder model; only decoder-only models are supported"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{family} has no language modeling head; load it with AutoModelForCausalLM")
    config = model.config.get_text_config(decoder=True)
    if not isinstance(model, PreTrainedModel) or getattr(model, "_is_stateful", False):
        raise UnsupportedModel(
            f"{family} keeps a recurrent state, which cannot be undone when a draft is rejected"
        )
    for layer in DynamicCache(config=config).layers:
        kind = type(layer).__name__
        if "Linear" in kind or "Conv" in kind or "Mamba" in kind:
            raise UnsupportedModel(
                f"{family} has recurrent, convolution or linear-attention layers ({kind}), "
                "whose state cannot be undone when a draft is rejected"
            )


def _context(config: Any) -> int | None:
    """Positions the model was made for, limited to those where its rows do not see each other's length."""
    context: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if any(kind.get("rope_type") in _ROPE_BY_LENGTH for kind in kinds):
        originals = [kind.get("original_max_position_embeddings") for kind in kinds]
        originals.append(getattr(config, "original_max_position_embeddings", None))
        known = [length for length in [context, *originals] if length]
        return min(known, default=None)
    return context


def _positions(row: Rows, offset: int, width: int) -> list[int]:
    """Position of each row: committed length + depth. Padding repeats the last one, a legal position."""
    size = len(row.tokens)
    places = range(size) if row.parents is None else depths(row.parents)
    positions = [offset + depth for depth in places]
    return positions + [positions[-1] if positions else 0] * (width - size)


def _bucket(width: int) -> int:
    """The power of two at or above a width."""
    return 1 << max(width - 1, 0).bit_length()


def _tokens(count: int, vocabulary: int, start: int = 1) -> list[int]:
    """Token ids that differ from each other, for tests."""
    return [(start + 3 * i) % vocabulary for i in range(count)]


def _row_path(row: Rows, node: int) -> list[int]:
    parents = row.parents if row.parents is not None else range(-1, len(row.tokens) - 1)
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]

"""A small model at the cost of a large one: widened and deepened without changing its function.

Measuring the cost of decoding at the shape of a 7B model would need a trained 7B model. A grown small trained
Llama model emits the same tokens as before at the cost of the larger one, so steps, acceptance and tokens are
those of a trained model. Function-preserving growth is from Net2Net (Chen, Goodfellow, Shlens 2015,
arXiv 1511.05641); here new units have no effect instead of sharing that of old ones.

With H, d, L and H', d', L' the model's and the shape's hidden size, head size and layers:

- **Width.** The residual stream is x' = (x, 0): embeddings, and the outputs of attention and feed-forward
  layers, are zero in the new dimensions. Then mean(x'^2) = (H/H') mean(x^2); with epsilon' = (H/H') epsilon

      w' x' / sqrt(mean(x'^2) + epsilon') = w' sqrt(H'/H) x / sqrt(mean(x^2) + epsilon),

  which is the model's RMSNorm for w' = sqrt(H/H') w.
- **Head size.** Rotary pair i of d/2 rotates by theta^(-2i/d) per position, in the dimensions i and i + d/2.
  With d' = r d the pair of the same frequency is r i, in the dimensions r i and r i + d'/2. Queries are zero
  in all other pairs, so that q'k' = qk. Attention divides by sqrt(d') instead of sqrt(d), so queries are
  multiplied by sqrt(r).
- **Heads.** A key and value head shared by more query heads than in the shape is copied. The output
  projection is zero for new heads and for the new dimensions of old ones.
- **Neurons.** The down projection is zero for new ones.
- **Layers.** Both output projections of a new layer are zero. New layers are spread evenly among the old, and
  the last layer is an old one, so that a drafter gains nothing by skipping the last layers.

Weights without effect on the output are small noise instead of zeros, with which some hardware draws less
power and so runs faster. They are multiplied by exact zeros, so they may be any finite numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace_lab.bench.llama_shapes import Shape, check_growth, grown_config, kv_copies

_USUAL_VOCABULARY = 32000  # of the models with these shapes
_NOISE = 0.02  # standard deviation, as is usual for the initialisation of weights


class Axis(NamedTuple):
    """Origin of an axis's entries: entry ``to[i]`` of the grown one is the model's ``of[i]``."""

    to: Tensor
    of: Tensor


@dataclass(frozen=True)
class _Kind:
    """Rule by which a weight grows: [out, in], or [out] for a bias or a norm.

    Attributes:
        rows, columns: names of its axes.
        noise: new entries are noise; otherwise zero. Noise in a new row belongs to a new unit, noise in a new
            column is multiplied by zero.
        scale: name of the factor that it is multiplied by.
    """

    rows: str
    columns: str = "hidden"
    noise: bool = False
    scale: str = "one"


_KINDS = {
    "embed_tokens": _Kind("vocabulary"),
    "q_proj": _Kind("queries", noise=True, scale="query"),
    "k_proj": _Kind("keys", noise=True),
    "v_proj": _Kind("values", noise=True),
    "o_proj": _Kind("hidden", "heads"),
    "gate_proj": _Kind("neurons", noise=True),
    "up_proj": _Kind("neurons", noise=True),
    "down_proj": _Kind("hidden", "neurons"),
    "lm_head": _Kind("vocabulary", noise=True),
    "input_layernorm": _Kind("hidden", scale="norm"),
    "post_attention_layernorm": _Kind("hidden", scale="norm"),
    "norm": _Kind("hidden", scale="norm"),
}


class Growth:
    """A Llama model grown to a shape; tensors are made one by one, on request.

    Args:
        model: a loaded transformers model of the family llama.
        shape: its new shape, not smaller in any size.
        dtype: dtype of the tensors; None is the model's.
        seed: seed of the noise.

    Attributes:
        config: the grown model's configuration.
        names: names of its tensors, mapped to their shapes.

    Raises:
        UnsupportedModel, OutpaceError: as ``check_growth``.
    """

    def __init__(self, model: Any, shape: Shape, dtype: torch.dtype | None = None, seed: int = 0) -> None:
        check_growth(model.config, shape)
        self.shape = shape
        self.dtype = dtype or model.dtype
        self.config = grown_config(model.config, shape)
        self.config.dtype = self.dtype
        self.model_class: type[Any] = type(model)
        with torch.device("meta"):
            empty = self.model_class(self.config)
        tied = (
            set(getattr(empty, "_tied_weights_keys", None) or ())
            if self.config.tie_word_embeddings
            else set()
        )
        self.names: Mapping[str, torch.Size] = {
            name: value.shape for name, value in empty.state_dict().items() if name not in tied
        }
        self.generation_config = model.generation_config
        self._weights: dict[str, Tensor] = model.state_dict()
        self._seed = seed
        own = Shape.of(model.config)
        self._layers = {(layer + 1) * shape.layers // own.layers - 1: layer for layer in range(own.layers)}
        self._axes = _axes(own, shape, self.config.vocab_size)
        self._scales = {
            "one": 1.0,
            "norm": (own.hidden_size / shape.hidden_size) ** 0.5,
            "query": (shape.head_dim / own.head_dim) ** 0.5,
        }

    @property
    def parameters(self) -> int:
        return sum(size.numel() for size in self.names.values())

    def tensor(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """Make one of the grown model's tensors on a device."""
        source = self._source(name)
        kind = _KINDS[name.split(".")[-2]]
        matrix = len(self.names[name]) == 2
        grown = self._blank(name, kind, device)
        if source is None:
            return grown
        # Rounded once, from the wider dtype.
        wide = torch.float64 if torch.float64 in (self.dtype, source.dtype) else torch.float32
        block = (source.to(wide) * self._scales[kind.scale]).to(grown.device, self.dtype)
        rows = self._axes[kind.rows]
        block, to = block[rows.of.to(block.device)], rows.to.to(grown.device)
        if kind.rows == "queries":
            grown.view(self.shape.heads, -1)[to // self.shape.head_dim] = 0
        if not matrix:
            grown[to] = block
            return grown
        columns = self._axes[kind.columns]
        block = block[:, columns.of.to(block.device)]
        grown[to[:, None], columns.to.to(grown.device)] = block
        return grown

    def _source(self, name: str) -> Tensor | None:
        """The model's tensor that this tensor grows from; None in a new layer."""
        parts = name.split(".")
        if "layers" not in parts:
            return self._weights[name]
        place = parts.index("layers") + 1
        layer = self._layers.get(int(parts[place]))
        if layer is None:
            return None
        return self._weights[".".join([*parts[:place], str(layer), *parts[place + 1 :]])]

    def _blank(self, name: str, kind: _Kind, device: torch.device | str | None) -> Tensor:
        """Make a tensor with only new entries: noise, zeros, or a norm's weights."""
        grown = torch.empty(self.names[name], dtype=self.dtype, device=device)
        if kind.scale == "norm":
            return grown.fill_(self._scales["norm"])
        if not kind.noise:
            return grown.zero_()
        generator = torch.Generator(grown.device).manual_seed(zlib.crc32(name.encode()) + self._seed)
        return grown.normal_(0.0, _NOISE, generator=generator)


def _axes(own: Shape, shape: Shape, vocabulary: int) -> dict[str, Axis]:
    """Map the model's entries to indices on each axis of a shape."""
    heads = torch.arange(own.heads)
    copies = kv_copies(own, shape)
    group, place = heads // own.group, heads % own.group
    to_heads = (group * copies + place // shape.group) * shape.group + place % shape.group
    kv = torch.arange(own.kv_heads * copies)
    pairs = torch.arange(own.head_dim // 2) * (shape.head_dim // own.head_dim)
    rotary = torch.cat([pairs, pairs + shape.head_dim // 2])
    plain = torch.arange(own.head_dim)

    def within(to: Tensor, of: Tensor, places: Tensor) -> Axis:
        """Axis of heads of different sizes: ``places`` are the indices within a head of the shape."""
        return Axis(
            (to[:, None] * shape.head_dim + places).flatten(), (of[:, None] * own.head_dim + plain).flatten()
        )

    def first(count: int) -> Axis:
        return Axis(torch.arange(count), torch.arange(count))

    return {
        "vocabulary": first(vocabulary),
        "hidden": first(own.hidden_size),
        "neurons": first(own.intermediate_size),
        "queries": within(to_heads, heads, rotary),
        "keys": within(kv, kv // copies, rotary),
        "values": within(kv, kv // copies, plain),
        "heads": within(to_heads, heads, plain),
    }


def vocabulary_note(config: Any, itemsize: int) -> str:
    """Describe how a grown model's vocabulary differs from that of models of its shape.

    Args:
        config: the grown model's.
        itemsize: bytes of a weight.
    """
    usual = (_USUAL_VOCABULARY - config.vocab_size) * config.hidden_size * itemsize
    if usual <= 0:
        return "the model's own"
    return (
        f"the model's own, so the head reads {usual / 1e6:,.0f} MB less in a step than with "
        f"{_USUAL_VOCABULARY} tokens"
    )


def grow(
    model: Any,
    shape: Shape,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Build a model of a larger shape that emits the same tokens as a small one, directly on a device.

    Its tensors are made one by one in place, without copies on disk or in memory. In float32 its logits are
    the model's up to rounding. In bfloat16 and float16 the products of norms and queries with their factors
    are rounded too, unless the factors are powers of two: the model then differs slightly from the small one
    in that dtype, and near-ties may be resolved differently.

    Args:
        model: a loaded transformers model of the family llama.
        shape: see ``outpace_lab.bench.llama_shapes``; vocabulary and context stay the model's.
        device, dtype: device and dtype of the grown model; None is the model's.

    Raises:
        UnsupportedModel, OutpaceError: as ``check_growth``.
    """
    place = torch.device(device) if device is not None else model.device
    growth = Growth(model, shape, dtype)
    with torch.device("meta"):
        grown = growth.model_class(growth.config)
    tensors = {name: growth.tensor(name, place) for name in growth.names}
    grown.load_state_dict(tensors, strict=False, assign=True)
    grown.tie_weights()
    with torch.device(place):  # its buffers are not in the state dict
        grown.model.rotary_emb = type(grown.model.rotary_emb)(config=growth.config)
    grown.generation_config = growth.generation_config
    return grown.eval().requires_grad_(False)

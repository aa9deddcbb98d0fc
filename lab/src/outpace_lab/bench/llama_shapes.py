"""Shapes of Llama models: the sizes that determine the cost of a step."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

from outpace.core import OutpaceError, UnsupportedModel
from outpace_lab.names import check_known

# A rotary pair keeps its frequency under another head size only if the type of embeddings treats pairs
# independently. Others depend on a pair's index, or the engine refuses them past their original length.
_PAIRWISE_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model, without vocabulary and context.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: neurons of a feed-forward layer.
        layers, heads, kv_heads: numbers of these; ``heads`` is a multiple of ``kv_heads``.
        head_dim: width of a head.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        wrong = [name for name, size in asdict(self).items() if size < 1]
        if wrong:
            raise OutpaceError(f"a shape's {wrong[0]} must be at least 1, not {getattr(self, wrong[0])}")
        if self.heads % self.kv_heads or self.hidden_size % self.heads or self.head_dim % 2:
            raise OutpaceError(
                "a shape's heads must be a multiple of its kv_heads, its hidden_size one of its heads, and "
                f"its head_dim even: {self}"
            )

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape of a Llama model, from its transformers configuration."""
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim or config.hidden_size // config.num_attention_heads,
        )

    @property
    def group(self) -> int:
        """Number of query heads per key and value head."""
        return self.heads // self.kv_heads


# 7B, 13B and 70B as in Llama 2, 34B as in Code Llama, 1B as in Llama 3.2; the smallest two are like them.
SHAPES = {
    "llama-0.1b": Shape(768, 3072, 12, 12, 12, 64),
    "llama-0.5b": Shape(1280, 3456, 24, 20, 20, 64),
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 64),
    "llama-7b": Shape(4096, 11008, 32, 32, 32, 128),
    "llama-13b": Shape(5120, 13824, 40, 40, 40, 128),
    "llama-34b": Shape(8192, 22016, 48, 64, 8, 128),
    "llama-70b": Shape(8192, 28672, 80, 64, 8, 128),
}


def load_shape(name: str) -> Shape:
    """Look up a shape by its name, as in ``llama-7b``.

    Raises:
        OutpaceError: there is no such shape; the message lists the existing ones.
    """
    check_known("shape", name, SHAPES)
    return SHAPES[name]


def check_growth(config: Any, shape: Shape) -> None:
    """Check that a model can be grown to a shape.

    Raises:
        UnsupportedModel: it is not a Llama model with floating-point weights. OutpaceError: the shape is
            smaller in some size, or lacks a head or a rotary frequency of the model.
    """
    if getattr(config, "model_type", None) != "llama":
        kind = getattr(config, "model_type", type(config).__name__)
        raise UnsupportedModel(f"only models of the family llama can be grown, and this is one of {kind}")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel("a quantised model cannot be grown; grow the one it was made from")
    own = Shape.of(config)
    smaller = [
        name for name, size in asdict(own).items() if name != "kv_heads" and size > getattr(shape, name)
    ]
    if smaller:
        name = smaller[0]
        raise OutpaceError(
            f"the shape is smaller than the model: {name} is {getattr(shape, name)}, the model's "
            f"{getattr(own, name)}; choose a larger shape, or a smaller model"
        )
    needed = own.kv_heads * kv_copies(own, shape)
    if needed > shape.kv_heads:
        raise OutpaceError(
            f"the shape has {shape.kv_heads} key and value heads, and the model's {own.heads} heads need "
            f"{needed} of them; choose a shape with more, or another model"
        )
    if shape.head_dim % own.head_dim:
        raise OutpaceError(
            f"the shape's head size {shape.head_dim} is not a multiple of the model's {own.head_dim}, so its "
            "rotary frequencies are not the model's; choose another shape or model"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if shape.head_dim != own.head_dim and rope not in _PAIRWISE_ROPE:
        raise OutpaceError(
            f"rotary embeddings of type {rope!r} change with the head size; choose a shape whose head size "
            f"is {own.head_dim}"
        )


def kv_copies(own: Shape, shape: Shape) -> int:
    """Number of a shape's key and value heads needed for each of the model's."""
    return -(-own.group // shape.group)


def grown_config(config: Any, shape: Shape) -> Any:
    """Make the configuration of a grown model: the model's, except for sizes and the norms' epsilon.

    The epsilon is H / H' times the model's, with hidden sizes H and H'; see ``outpace_lab.bench.growth``.
    """
    grown = copy.deepcopy(config)
    grown.hidden_size = shape.hidden_size
    grown.intermediate_size = shape.intermediate_size
    grown.num_hidden_layers = shape.layers
    grown.num_attention_heads = shape.heads
    grown.num_key_value_heads = shape.kv_heads
    grown.head_dim = shape.head_dim
    grown.rms_norm_eps = config.rms_norm_eps * config.hidden_size / shape.hidden_size
    return grown

"""What ``native/forward.h`` reads: a decoder's layers, the rows of a batch, room for the results."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p


class ProductStruct(Structure):
    """``struct product`` of ``tiles.h``."""

    _fields_ = [
        *((name, c_int64) for name in ("inputs", "outputs", "bits")),
        *((name, c_void_p) for name in ("weights", "bias")),
    ]


class QuantPartStruct(Structure):
    """``struct quant_part`` of ``quant_products.h``."""

    _fields_ = [("outputs", c_int64), ("type", c_int32), ("weights", c_void_p)]


class QuantsStruct(Structure):
    """``struct quants``."""

    _fields_ = [("parts", c_int32), ("part", POINTER(QuantPartStruct))]


class NormStruct(Structure):
    """``struct norm`` of ``norms.h``."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias")),
        ("epsilon", c_float),
        ("kind", c_int32),
    ]


class LayerStruct(Structure):
    """``struct layer``."""

    _fields_ = [
        *((name, ProductStruct) for name in ("joined", "output", "gates", "down")),
        *((name, NormStruct) for name in ("before", "after", "between", "last")),
        *((name, NormStruct) for name in ("queries", "keys", "each_query", "each_key")),
        *((name, c_float) for name in ("scale", "cap", "residual")),
        *((name, c_int32) for name in ("heads", "shared", "size", "view", "cached")),
        *((name, c_int32) for name in ("activation", "gated", "parallel")),
    ]


class ViewStruct(Structure):
    """``struct view``."""

    _fields_ = [
        *((name, c_int32) for name in ("window", "sinks", "recent", "rotary", "interleaved")),
        *((name, c_void_p) for name in ("cosine", "sine")),
    ]


class DecoderStruct(Structure):
    """``struct decoder``."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "views")),
        ("hidden", c_int64),
        ("layer", POINTER(LayerStruct)),
        ("view", POINTER(ViewStruct)),
        ("embeddings", c_void_p),
        ("embedding", c_float),
        ("norm", NormStruct),
        ("head", ProductStruct),
        *((name, c_float) for name in ("logit", "cap")),
    ]


class LaneStruct(Structure):
    """``struct lane``."""

    _fields_ = [
        *((name, c_int32) for name in ("first", "end")),
        *((name, c_void_p) for name in ("buffers", "sequence_stride", "head_stride")),
    ]


class BatchStruct(Structure):
    """``struct batch``."""

    _fields_ = [
        *((name, c_int32) for name in ("sequences", "lanes", "read")),
        *((name, c_void_p) for name in ("begin", "seat", "past", "fed", "parents", "tokens", "rows")),
        ("lane", POINTER(LaneStruct)),
        ("inputs", c_void_p),
    ]


class ForwardRoomStruct(Structure):
    """``struct forward_room``."""

    _fields_ = [
        *((name, c_void_p) for name in ("state", "added", "joined", "attended", "both", "inner", "picked")),
        *((name, c_void_p) for name in ("queries", "numbers", "columns", "held")),
        *((name, c_void_p) for name in ("states", "normed", "logits")),
    ]


HELD_BYTES = 24  # of ``struct held`` of ``rows.h``
MARKED = 1  # ``bits`` of a product whose weights are a ``struct quants``
PER_ROW = 8  # numbers of a row in ``struct forward_room``
NORMS = {"": 0, "rms": 1, "wide rms": 2, "layer": 3}  # ``enum norm_kind``
ACTIVATIONS = {  # transformers' names -> ``enum activation``
    "silu": 0,
    "swish": 0,
    "gelu_pytorch_tanh": 1,
    "gelu_new": 1,
    "gelu_fast": 1,
    "gelu": 2,
}
STRUCTS: dict[str, type[Structure]] = {
    "norm": NormStruct,
    "quant_part": QuantPartStruct,
    "quants": QuantsStruct,
    "layer": LayerStruct,
    "view": ViewStruct,
    "decoder": DecoderStruct,
    "lane": LaneStruct,
    "batch": BatchStruct,
    "forward_room": ForwardRoomStruct,
}

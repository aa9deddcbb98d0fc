"""A model by name, grown to a larger shape in memory."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core import USUAL, TargetOptions
from outpace.loading import Loaded
from outpace.loading.loaded import made
from outpace.loading.placement import device_of, dtype_of
from outpace.loading.weights import load_weights
from outpace_lab.bench.growth import grow
from outpace_lab.bench.llama_shapes import load_shape


@dataclass(frozen=True)
class Grown(Loaded):
    """A model grown in memory, which no other process can load.

    Attributes:
        like: the name of its shape.
    """

    like: str = ""


def load_grown(
    name: str | None,
    like: str,
    dtype: str = "auto",
    device: str | None = None,
    *,
    trust_remote_code: bool = False,
    options: TargetOptions = USUAL,
) -> Grown:
    """Load a model and grow it directly on the device.

    Args:
        like: the name of a shape, see ``outpace_lab.bench.llama_shapes``.
        name, dtype, device, trust_remote_code, options: as for ``outpace.loading.load``.

    Raises:
        OutpaceError: there is no such shape, or as for ``load``.
        UnsupportedModel: the model cannot be grown to it, or as for ``load``.
    """
    place, shape = device_of(device), load_shape(like)
    shown, model, tokenizer = load_weights(name, dtype_of(dtype, place), trust_remote_code)
    grown = grow(model, shape, place)
    loaded = made(f"{shown} grown to {like}", grown, tokenizer, options=options)
    return Grown(**vars(loaded), like=like)

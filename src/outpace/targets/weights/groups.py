"""Weights that a checkpoint has rounded by groups of inputs: which layouts compiled products take, and how.

A weight is (number - zero) * scale, with a scale and a zero per output and group. GPTQ, AWQ and
compressed-tensors keep several numbers in one of 32 bits, each in an order of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outpace.core import UnsupportedModel
from outpace.native.layers import SHARE

BITS = (4, 8)
_WORD = 32  # bits that numbers are packed into
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight numbers, in the order of their outputs
_WHOLE = (-1, None)  # group sizes that mean all inputs
_NEEDS = f"supported are groups of a multiple of {SHARE} inputs"

Read = Callable[[str], Tensor | None]
Config = Mapping[str, Any]


class Groups(NamedTuple):
    """A layer's weights.

    Attributes:
        numbers: [outputs, inputs], from 0 to 2^bits - 1.
        scales, zeros: [outputs, groups].
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor


class Layout(ABC):
    """A published way to store such weights.

    Attributes:
        marks: endings of tensors' names that a layer of floats does not have.
        packed, scales: endings of the names of the numbers and of the scales.
    """

    marks: ClassVar[str]
    packed: ClassVar[str]
    scales: ClassVar[str]

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def bits(self) -> Any:
        """The bits that the config names, of the widest layers."""
        return self.config.get("bits", self.config.get("w_bit"))

    @abstractmethod
    def why_refused(self) -> str | None:
        """The reason, known from the config, why the products do not take its weights; None if they do."""

    @abstractmethod
    def shapes(self, bits: int, inputs: int, outputs: int) -> tuple[tuple[int, int], int]:
        """The shape of the packed numbers of a layer, and which dimension of the scales is that of groups."""

    @abstractmethod
    def read(self, read: Read, bits: int, inputs: int, outputs: int) -> Groups:
        """A layer's weights; ``read`` returns a tensor by the ending of its name, or None.

        Raises:
            UnsupportedModel: their order or their zeros are not what the products take.
        """

    def check(self, name: str, found: Mapping[str, tuple[int, ...]], inputs: int, outputs: int) -> int:
        """The bits of a layer's numbers, by the shapes of its tensors.

        Raises:
            UnsupportedModel: it has another number of bits, or groups of another size.
        """
        packed, scales = found.get(self.packed), found.get(self.scales, ())
        for bits in BITS:
            shape, along = self.shapes(bits, inputs, outputs)
            if packed != shape:
                continue
            groups = scales[along] if len(scales) == 2 and scales[1 - along] == outputs else 0
            if groups and inputs % groups == 0 and inputs // groups % SHARE == 0:
                return bits
            raise UnsupportedModel(f"{name} of {inputs} inputs has {self.scales} of shape {scales}; {_NEEDS}")
        raise UnsupportedModel(
            f"{name} has {self.packed} of shape {packed}, which is not {inputs} inputs and {outputs} outputs "
            f"in {' or '.join(map(str, BITS))} bits"
        )


class GPTQ(Layout):
    """GPTQ, as AutoGPTQ and GPTQModel write it: packed along inputs, zeros along outputs."""

    marks, packed, scales = "qweight", "qweight", "scales"

    def why_refused(self) -> str | None:
        found, bits = self.config, self.bits
        kind = found.get("checkpoint_format", found.get("format")) or "gptq"
        if kind not in ("gptq", "gptq_v2") or found.get("is_marlin_format"):
            return f"its layout is {kind if kind != 'gptq' else 'marlin'}; supported are gptq and gptq_v2"
        if found.get("desc_act") and found.get("group_size") not in _WHOLE:
            return "desc_act orders its inputs by activation; quantise it with desc_act=False"
        if bits == 8 and not self._symmetric:
            return "8 bits with zeros (sym=False); quantise it with sym=True"
        return _why_not_bits(bits) or _why_not_groups(found.get("group_size"))

    @property
    def _symmetric(self) -> bool:
        return bool(self.config.get("sym", True))

    def shapes(self, bits: int, inputs: int, outputs: int) -> tuple[tuple[int, int], int]:
        return (inputs * bits // _WORD, outputs), 0

    def read(self, read: Read, bits: int, inputs: int, outputs: int) -> Groups:
        scales, order = _there(read, self.scales), read("g_idx")
        groups = len(scales)
        if order is not None and not torch.equal(order.long(), torch.arange(inputs) // (inputs // groups)):
            raise UnsupportedModel("g_idx orders its inputs by activation; quantise it with desc_act=False")
        zeros = unpacked(_there(read, "qzeros"), bits, 1)[:, :outputs]
        middle = 1 << (bits - 1)
        if self._symmetric:  # stored less one, or as it is whatever the config says
            if not ((zeros == middle) | (zeros == middle - 1)).all():
                raise UnsupportedModel(f"sym=True, but its zeros are not {middle}; set sym to False")
            zeros = torch.full_like(zeros, middle)
        elif self.config.get("checkpoint_format") != "gptq_v2":
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return Groups(unpacked(_there(read, self.packed), bits, 0).T, scales.T, zeros.T)


class AWQ(Layout):
    """AWQ, as AutoAWQ writes it for its product "gemm": packed along outputs, in an order of its own."""

    marks, packed, scales = "qweight", "qweight", "scales"

    def why_refused(self) -> str | None:
        found = self.config
        kind = str(found.get("version", found.get("format")) or "gemm").lower()
        if kind != "gemm":
            return f"its layout is {kind}; supported is gemm"
        if not found.get("zero_point", True):
            return "it has no zeros (zero_point=False); quantise it with zero_point=True"
        if self.bits == 8:
            return "8 bits; AWQ is read in 4"
        return _why_not_bits(self.bits) or _why_not_groups(found.get("group_size", found.get("q_group_size")))

    def shapes(self, bits: int, inputs: int, outputs: int) -> tuple[tuple[int, int], int]:
        return (inputs, outputs * bits // _WORD), 0

    def read(self, read: Read, bits: int, inputs: int, outputs: int) -> Groups:
        numbers, zeros = (
            unpacked(_there(read, name), bits, 1).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1)
            for name in (self.packed, "qzeros")
        )
        return Groups(numbers.T, _there(read, self.scales).T, zeros.T)


class PackedTensors(Layout):
    """compressed-tensors' format pack-quantized, as llm-compressor writes it: all along inputs."""

    marks, packed, scales = "weight_packed", "weight_packed", "weight_scale"

    @property
    def bits(self) -> Any:
        found = [(scheme.get("weights") or {}).get("num_bits") for scheme in _schemes(self.config)]
        return max((bits for bits in found if isinstance(bits, int)), default=None)

    def why_refused(self) -> str | None:
        found = self.config
        for name in ("kv_cache_scheme", "transform_config"):
            if found.get(name):
                return f"it has a {name}, which outpace does not apply"
        if (found.get("sparsity_config") or {}).get("format", "dense") != "dense":
            return "its weights are sparse as well"
        return next(filter(None, map(self._why_refused, _schemes(found))), None)

    def _why_refused(self, scheme: Config) -> str | None:
        weights = scheme.get("weights") or {}
        if scheme.get("output_activations") or not _as_rounded_here(scheme.get("input_activations")):
            return "its activations are rounded; supported are weights alone, and 8 bits per token as it runs"
        if (kind := scheme.get("format") or self.config.get("format")) != self.config.get("format"):
            return f"layers in {kind} and in {self.config.get('format')}; supported is one format"
        if weights.get("type", "int") != "int" or weights.get("dynamic"):
            return "its weights are floats, or rounded as it runs; supported are integers"
        if weights.get("actorder") in (True, "group", "dynamic"):
            return "actorder orders its inputs by activation; quantise it with actorder='weight'"
        if (way := weights.get("strategy")) not in ("group", "channel"):
            return f"its scales are per {way}; supported are group and channel"
        if weights.get("num_bits") == 8 and not weights.get("symmetric", True):
            return "8 bits with zeros (symmetric=False); quantise it with symmetric=True"
        return _why_not_bits(weights.get("num_bits")) or _why_not_groups(weights.get("group_size"))

    def shapes(self, bits: int, inputs: int, outputs: int) -> tuple[tuple[int, int], int]:
        return (outputs, inputs * bits // _WORD), 1

    def read(self, read: Read, bits: int, inputs: int, outputs: int) -> Groups:
        if read("weight_g_idx") is not None:
            raise UnsupportedModel("weight_g_idx orders its inputs by activation; use actorder='weight'")
        scales = _there(read, self.scales)
        return Groups(self._numbers(read, bits), scales, self._zeros(read, bits, scales))

    def _numbers(self, read: Read, bits: int) -> Tensor:
        return unpacked(_there(read, self.packed), bits, 1)

    def _zeros(self, read: Read, bits: int, scales: Tensor) -> Tensor:
        if (zeros := read("weight_zero_point")) is None:
            return torch.full(scales.shape, 1 << (bits - 1))
        if zeros.dtype == torch.int8:  # earlier versions do not pack them
            return zeros.to(torch.int16) + (1 << (bits - 1))
        return unpacked(zeros, bits, 0)[: len(scales)]


class IntTensors(PackedTensors):
    """compressed-tensors' format int-quantized: numbers of 8 bits, with signs."""

    marks, packed = "weight_scale", "weight"

    def shapes(self, bits: int, inputs: int, outputs: int) -> tuple[tuple[int, int], int]:
        return (outputs, inputs if bits == 8 else 0), 1

    def _numbers(self, read: Read, bits: int) -> Tensor:
        return _there(read, self.packed).to(torch.int16) + 128


def layout_of(config: Config | None) -> Layout | None:
    """The layout of the weights of a checkpoint, by the ``quantization_config`` in its config.

    None if weights are floats, or quantised in a way that only transformers and its packages know.
    """
    method, kind = (config or {}).get("quant_method"), (config or {}).get("format")
    kinds: dict[tuple[Any, Any], type[Layout]] = {
        ("gptq", None): GPTQ,
        ("awq", None): AWQ,
        ("compressed-tensors", "pack-quantized"): PackedTensors,
        ("compressed-tensors", "int-quantized"): IntTensors,
    }
    found = kinds.get((method, kind if method == "compressed-tensors" else None))
    return None if found is None or config is None else found(config)


def unpacked(words: Tensor, bits: int, along: int) -> Tensor:
    """Numbers of some bits from words of 32, lowest first: uint8, longer along one of two dimensions."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    apart = words.unsqueeze(along + 1) >> (shifts[:, None] if along == 0 else shifts)
    return (apart & ((1 << bits) - 1)).to(torch.uint8).flatten(along, along + 1)


def _there(read: Read, name: str) -> Tensor:
    if (found := read(name)) is None:
        raise UnsupportedModel(f"its {name} is missing")
    return found


def _why_not_bits(bits: object) -> str | None:
    """The reason not to take numbers of these bits; None to take them."""
    return None if bits in BITS else f"{bits!r} bits; supported are {' and '.join(map(str, BITS))}"


def _why_not_groups(size: object) -> str | None:
    """The reason not to take groups of this size; None to take them."""
    fits = size in _WHOLE or (isinstance(size, int) and size > 0 and size % SHARE == 0)
    return None if fits else f"groups of {size!r} inputs; {_NEEDS}"


def _schemes(config: Config) -> Iterator[Config]:
    """How the layers of a checkpoint of compressed-tensors are quantised."""
    groups = config.get("config_groups") or {}
    yield from (group for group in groups.values() if isinstance(group, Mapping))


def _as_rounded_here(activations: Config | None) -> bool:
    """True if a product's rows are to stay floats, or to be rounded to 8 bits as it runs, as here."""
    if not activations:
        return True
    kind = activations.get("type", "int"), activations.get("num_bits"), activations.get("strategy")
    return kind == ("int", 8, "token") and activations.get("dynamic") is True

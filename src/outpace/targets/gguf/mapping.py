"""What a GGUF file's tensors are in transformers' model: their names, and what is done to their numbers.

Both are transformers' own, which has two ways to say them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import UnsupportedModel

# Weights of all experts of a layer, of which the gate's and the others are in one in transformers.
_STACKED = re.compile(r".*\.layers\.(\d+)\..*\.experts\.(gate_up_proj|down_proj)")


class TensorMap(Protocol):
    """The tensors of a family's files.

    Attributes:
        names: llama.cpp's -> transformers'.
    """

    names: dict[str, str]

    def numbers(self, name: str, numbers: NDArray[Any]) -> NDArray[Any]:
        """A tensor's numbers as the model has them."""

    def rows(self, name: str, numbers: NDArray[Any]) -> NDArray[Any]:
        """Numbers of a matrix's rows, one each, in the model's order of rows."""

    def inputs(self, name: str) -> Tensor | None:
        """The order of a matrix's inputs that the file's columns are for; None for the model's."""


def tensor_map(architecture: str, model: Any, tensors: Iterable[str]) -> TensorMap:
    """The map of a family."""
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    if is_gguf_arch_supported(architecture):
        return _Converted(architecture, model, tensors)
    return _Processed(architecture, model)


def order_of(tensors: TensorMap, name: str, rows: int) -> Tensor | None:
    """The file's row of each output, where llama.cpp's converter has permuted them; None where not."""
    own = np.arange(rows, dtype=np.int32)
    found = tensors.rows(name, own).reshape(-1)
    if len(found) != rows:
        raise UnsupportedModel(f"the rows of {name} are not in an order that can be undone")
    return None if np.array_equal(found, own) else torch.from_numpy(np.ascontiguousarray(found))


class _Processed:
    """By a tensor processor; names are those of the gguf package."""

    def __init__(self, architecture: str, model: Any) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        made: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor = made(config=model.config.to_dict())
        self.names = self._named(architecture, model)

    def numbers(self, name: str, numbers: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = self._processor.process(weights=numbers, name=name).weights
        return found

    def rows(self, name: str, numbers: NDArray[Any]) -> NDArray[Any]:
        # A bias has the order of the rows of its matrix, which some families turn besides.
        return self.numbers(name.removesuffix("weight") + "bias", numbers)

    def inputs(self, name: str) -> Tensor | None:
        return None

    def _named(self, architecture: str, model: Any) -> dict[str, str]:
        """As ``get_gguf_hf_weights_map``, which makes the table of names anew for each module."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
        if kind is None:
            raise UnsupportedModel(f"this version of gguf has no names for {architecture}")
        known, found = get_tensor_name_map(kind, model.config.num_hidden_layers), dict[str, str]()
        base = f"{model.base_model_prefix}."  # Bloom's names are without it
        for name in model.state_dict():
            stem, _, end = name.rpartition(".")
            stem, end = (stem, f".{end}") if end in ("weight", "bias") else (name, "")
            if (part := _STACKED.fullmatch(name)) is not None:
                for layer in ("down",) if part[2] == "down_proj" else ("gate", "up"):
                    found[f"blk.{part[1]}.ffn_{layer}_exps.weight"] = name
            elif (own := known.get_name(stem) or known.get_name(stem.removeprefix(base))) is not None:
                found[own + (end or ".weight")] = found[own + end] = (
                    name  # Gemma 4's scale of a layer has an end
                )
        return found


class _Converted:
    """By renamings and operations on weights."""

    def __init__(self, architecture: str, model: Any, tensors: Iterable[str]) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        from transformers.integrations.gguf.utils import get_gguf_conversion_mapping

        mapping = get_gguf_conversion_mapping(architecture, model.config)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        operations = {pattern: one.operations for one in converters for pattern in one.source_patterns}
        self.names = dict[str, str]()
        self._operations = dict[str, list[Any]]()
        for name in tensors:
            self.names[name], pattern = rename_source_key(name, renamings, converters)
            self._operations[name] = operations[pattern] if pattern is not None else []

    def numbers(self, name: str, numbers: NDArray[Any]) -> NDArray[Any]:
        found = torch.from_numpy(numbers)
        for operation in self._operations[name]:
            if not hasattr(operation, "input_permutation"):
                found = operation.convert({name: found}, [name], [name])[name]
        return found.numpy()

    rows = numbers

    def inputs(self, name: str) -> Tensor | None:
        found = (getattr(one, "input_permutation", None) for one in self._operations[name])
        order = next((one for one in found if one is not None), None)
        plain = order is None or torch.equal(order, torch.arange(len(order)))
        return None if plain else order

"""Loading of a GGUF file into a transformers model whose matrices stay as they are in the file.

Config and the order of rows are transformers' own (``modeling_gguf_pytorch_utils``). Its reader takes half a
minute for a large vocabulary, so it is given a copy of the header without one.
"""

from __future__ import annotations

import logging
import re
import tempfile
from bisect import bisect_right
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outpace.core import UnsupportedModel, first_line, load_extra
from outpace.native.layers import functions
from outpace.targets.cpu.quants import (
    TYPES,
    QuantEmbedding,
    QuantLinear,
    QuantPart,
    compiled,
    row_bytes,
)
from outpace.targets.gguf.mapping import TensorMap, order_of, tensor_map
from outpace.targets.gguf.modules import Expert, Gathered, Mixture
from outpace.targets.gguf.settings import gemma4, mixture, settle
from outpace.targets.llamacpp.header import joined
from outpace.targets.llamacpp.library import check_file, parts_of

_FREQUENCIES = "rope_freqs.weight"
_HUGE = 1e20
_PREDICTING = "mtp."  # transformers' name of layers that it leaves out
_MIXED = re.compile(r"blk\.\d+\.ffn_(gate_inp|(?:gate|up|down)_exps)\.weight")  # of a mixture
_STEPS = ".ssm_dt."  # Mamba multiplies this weight itself
# Small ones, which are in float32 in files of all types: recurrent layers', and a mixture's router.
_SMALL = (".ssm_", ".shortconv.conv.", ".ffn_gate_inp")
_ENDS = ("eos", "eot", "eom")
_NAMES = {number: name for name, number in TYPES.items()}


class _Place(NamedTuple):
    """A tensor in a file, or in one of its parts: torch's shape."""

    type: int
    shape: tuple[int, ...]
    start: int
    size: int
    path: Path


# Whose files the tests compare with the model that they were written from.
_FAMILIES = frozenset(
    {
        "bloom",
        "falcon",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma4_text",
        "gpt2",
        "lfm2",
        "llama",
        "mamba",
        "mistral",
        "mixtral",
        "nemotron",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "stablelm",
        "starcoder2",
    }
)


class GgufFile:
    """A GGUF file's config, and its tensors by transformers' names.

    Args:
        path: the file, or the first part of a split one.

    Attributes:
        config: transformers'.
        architecture: llama.cpp's name of the family.
        vocabulary: number of its tokens with texts; 0 without a tokenizer.
        begin: where tensors begin.

    Raises:
        OutpaceError: the file is broken, or a package is missing.
        UnsupportedModel: transformers does not know the family, or a type is not read here.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._ends = path, dict[str, int]()
        load_extra("gguf", "a GGUF file", "gguf")
        check_file(path)
        _need(compiled())
        parts = parts_of(path)
        head = joined(parts)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            with copy.open("wb") as file:  # of the tensors it has no bytes, only the room
                file.write(head.head)
                file.truncate(head.size)
            self.config, self.architecture, tensors = _described(copy, self._ends, head.vocabulary)
        family = self.config.model_type
        if family not in _FAMILIES:  # names and rows by transformers' mapping that no test has compared
            raise UnsupportedModel(f"files of {family} are not among those that are tested here")
        self.vocabulary, (_, self.begin) = head.vocabulary, head.places[0]
        self._places = {}
        for name, place in tensors.items():
            part = bisect_right(head.places, place.start, key=itemgetter(0)) - 1
            start, begin = head.places[part]
            self._places[name] = place._replace(start=place.start - start + begin, path=parts[part])
        unknown = {place.type for place in self._places.values()} - set(_NAMES)
        if unknown:
            raise UnsupportedModel(f"tensors of ggml's type {min(unknown)} are not read")
        self.config.tie_word_embeddings = "output.weight" not in self._places
        table = self._places.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise UnsupportedModel("it has no embeddings")
        self.config.vocab_size = table.shape[0]
        if (positions := self._places.get("position_embd.weight")) is not None:
            self.config.max_position_embeddings = positions.shape[0]  # GPT-2's entry has another name
        if (self.config.pad_token_id or 0) >= table.shape[0]:  # the family's default, for another vocabulary
            self.config.pad_token_id = None

    @property
    def floats(self) -> bool:
        """True if some matrices are in floats that bfloat16 does not hold."""
        wide = (TYPES["f32"], TYPES["f16"])
        return any(
            len(place.shape) > 1 and place.type in wide and not any(small in name for small in _SMALL)
            for name, place in self._places.items()
        )

    def model(self, name: str = "auto") -> Any:
        """The model, with rows in a dtype; "auto" is bfloat16, or float32 if there are ``floats``.

        Raises:
            UnsupportedModel: a tensor has no place in transformers' model, or a part of that no tensor.
        """
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        chosen = ("float32" if self.floats else "bfloat16") if name == "auto" else name
        dtype: torch.dtype = getattr(torch, chosen)
        _need(functions(dtype))
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        if self._ends:
            model.generation_config.eos_token_id = sorted(set(self._ends.values()))
        return self._filled(model.eval(), dtype)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _filled(self, model: Any, dtype: torch.dtype) -> Any:
        tensors = tensor_map(self.architecture, model, self._places)
        known, mixtures = model.state_dict(), dict[str, dict[str, _Place]]()
        for name, place in self._places.items():
            own = tensors.names.get(name, "")
            if name == _FREQUENCIES or own.startswith(_PREDICTING):
                continue
            if own not in known:
                raise UnsupportedModel(f"transformers' {self.config.model_type} has no place for {name}")
            if (part := _MIXED.fullmatch(name)) is not None:
                mixtures.setdefault(own.rsplit(".", 2)[0], {})[part[1]] = place
            else:
                self._place(model, tensors, name, place, dtype)
        for owner, places in mixtures.items():
            model.set_submodule(owner, self._mixture(model.get_submodule(owner), places, dtype))
        if (slow := self._places.get(_FREQUENCIES)) is not None:
            self._slow(model, slow)
        missing = [name for name, weight in model.named_parameters() if weight.is_meta]
        if missing:
            raise UnsupportedModel(f"it has no tensor for {missing[0]}")
        return model

    def _place(self, model: Any, tensors: TensorMap, name: str, place: _Place, dtype: torch.dtype) -> None:
        """Put a tensor into the model."""
        owner, _, kind = tensors.names[name].rpartition(".")
        module, head = model.get_submodule(owner), model.get_output_embeddings()
        table = model.get_input_embeddings()
        if isinstance(module, nn.Embedding):
            if place.shape != tuple(module.weight.shape):
                raise UnsupportedModel(
                    f"{name} is {list(place.shape)}, and its layer {[*module.weight.shape]}"
                )
            model.set_submodule(owner, QuantEmbedding(module, place.type, self._bytes(place), dtype))
            if module is table and self.config.tie_word_embeddings:
                own = next(name for name, part in model.named_modules() if part is head)
                model.set_submodule(own, self._linear(_linear_of(head), name, place, dtype))
        elif (linear := _linear_of(module)) is not None and kind == "weight" and _STEPS not in name:
            if len(place.shape) == 1:  # of a single output
                place = place._replace(shape=(1, *place.shape))
            made: nn.Module = self._linear(
                linear, name, place, dtype, order_of(tensors, name, place.shape[0])
            )
            if (inputs := tensors.inputs(name)) is not None:
                made = Gathered(made, inputs)
            model.set_submodule(owner, made)
        else:
            self._fill(module, kind, name, place, tensors, dtype)

    def _mixture(self, block: Any, places: Mapping[str, _Place], dtype: torch.dtype) -> Mixture:
        """A block of experts, by the names of its tensors."""
        for name in ("gate_inp", "gate_exps", "up_exps", "down_exps"):
            if name not in places:
                raise UnsupportedModel(f"a layer with experts has no tensor ffn_{name}")
        router = places["gate_inp"]
        experts, hidden = tuple(block.gate.weight.shape)
        inner = block.experts.down_proj.shape[-1]
        shapes = {"gate_exps": (inner, hidden), "up_exps": (inner, hidden), "down_exps": (hidden, inner)}
        if router.shape != (experts, hidden):
            raise UnsupportedModel(f"its router is {list(router.shape)}, and its layer {[experts, hidden]}")
        layers: dict[str, list[QuantLinear]] = {}
        for name, shape in shapes.items():
            place, whole = places[name], (experts, *shape)
            if place.shape != whole:
                raise UnsupportedModel(f"ffn_{name} is {list(place.shape)}, and its layer {list(whole)}")
            blocks, line = self._bytes(place), _linear(*shape, dtype)
            layers[name] = [
                QuantLinear(line, QuantPart.pack(place.type, some, shape[1]), dtype)
                for some in blocks.split(shape[0])
            ]
        part = QuantPart.pack(router.type, self._bytes(router), hidden)
        chosen = QuantLinear(_linear(experts, hidden, torch.float32), part, torch.float32)
        return Mixture(block, chosen, [*map(Expert, *layers.values())])

    def _linear(
        self, linear: Any, name: str, place: _Place, dtype: torch.dtype, order: Tensor | None = None
    ) -> QuantLinear:
        if place.shape != (linear.out_features, linear.in_features):
            raise UnsupportedModel(
                f"{name} is {list(place.shape)}, and its layer {[linear.out_features, linear.in_features]}"
            )
        # Mapped anew for each: pages that were read are then not resident beside the panels.
        part = QuantPart.pack(place.type, self._bytes(place), place.shape[1], order)
        return QuantLinear(linear, part, dtype)

    def _fill(
        self, module: Any, kind: str, name: str, place: _Place, tensors: TensorMap, dtype: torch.dtype
    ) -> None:
        """Set a norm's or a bias's numbers, or those of another small tensor."""
        gguf = load_extra("gguf", "a GGUF file", "gguf")
        raw = self._bytes(place).numpy().reshape(-1)
        if place.type in (TYPES["f32"], TYPES["f16"]):
            raw = raw.view(np.float32 if place.type == TYPES["f32"] else np.float16)
        numbers = gguf.dequantize(raw, gguf.GGMLQuantizationType(place.type)).reshape(place.shape)
        numbers = tensors.numbers(name, np.array(numbers, dtype=np.float32))
        own = getattr(module, kind)
        if own.shape != numbers.shape:
            raise UnsupportedModel(f"{name} is {list(numbers.shape)}, and its layer {list(own.shape)}")
        value = torch.from_numpy(np.ascontiguousarray(numbers)).type(dtype)
        setattr(
            module, kind, nn.Parameter(value, requires_grad=False) if isinstance(own, nn.Parameter) else value
        )

    def _slow(self, model: Any, place: _Place) -> None:
        """Divide the frequencies of rotation by the file's factors (Llama 3.1), as llama.cpp does.

        In Gemma 4 a huge factor stands for no rotation.
        """
        rotary = getattr(getattr(model, model.base_model_prefix), "rotary_emb", None)
        own = getattr(rotary, "inv_freq", getattr(rotary, "full_attention_inv_freq", None))
        fits = own is not None and place.type == TYPES["f32"] and place.shape == tuple(own.shape)
        factors = self._bytes(place).flatten().view(torch.float32) if fits else None
        if own is None or factors is None or not torch.equal(own == 0, factors > _HUGE):
            raise UnsupportedModel(f"its {_FREQUENCIES} does not fit transformers' rotation")
        own /= factors

    def _bytes(self, place: _Place) -> Tensor:
        """A tensor's bytes in the file, mapped: [rows, bytes of one]."""
        whole = torch.from_file(str(place.path), size=place.path.stat().st_size, dtype=torch.uint8)
        part = whole[place.start : place.start + place.size]
        return part.view(-1, row_bytes(place.type, place.shape[-1]))


def _need(library: Any) -> None:
    """Refuse to go on without compiled functions, for the reason that is there instead."""
    if isinstance(library, str):
        raise UnsupportedModel(f"products with its weights are compiled functions: {library}")


def _described(copy: Path, ends: dict[str, int], vocabulary: int) -> tuple[Any, str, Mapping[str, _Place]]:
    """Config, architecture and tensors of a file; their places are those in this copy of its header.

    Args:
        ends: filled with the tokens that end a text, or a turn.
        vocabulary: tokens of the file, whose texts this copy has not.
    """
    from gguf import GGUFReader
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    told = logging.getLogger("transformers.modeling_gguf_pytorch_utils")  # of the vocabulary, left out here
    level = told.level
    told.setLevel(logging.ERROR)
    try:
        reader = GGUFReader(copy)
        field = reader.fields["general.architecture"]
        architecture = bytes(field.parts[field.data[0]]).decode()
        for name in _ENDS:
            if (value := reader.fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
                ends[name] = int(value.contents())
        own = f"{architecture}."
        values = {
            name.removeprefix(own): field.contents()
            for name, field in reader.fields.items()
            if name.startswith(own)
        }
        if architecture == "gemma4":
            config = gemma4(values, {tensor.name: int(tensor.shape[-1]) for tensor in reader.tensors})
        else:
            config = mixture(_config(copy, architecture, vocabulary), values)
        mapped: Any = GGUF_CONFIG_MAPPING.get(config.model_type) or GGUF_CONFIG_MAPPING.get(architecture, {})
        settle(config, values, mapped)
    except UnsupportedModel:
        raise
    except Exception as error:  # transformers and gguf raise anything for what they do not know
        raise UnsupportedModel(f"transformers cannot read its config: {first_line(error)}") from error
    finally:
        told.setLevel(level)
    places = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        start, size = int(tensor.data_offset), int(tensor.n_bytes)
        places[tensor.name] = _Place(int(tensor.tensor_type), shape, start, size, copy)
    return config, architecture, places


def _config(copy: Path, architecture: str, vocabulary: int) -> Any:
    """transformers' config. It has two ways to read one, and the newer one counts the texts."""
    from transformers import AutoConfig
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS, get_gguf_config
    from transformers.integrations.gguf.reader import read_gguf_metadata

    if architecture not in GGUF_CONFIG_ARCHS:
        return AutoConfig.from_pretrained(str(copy.parent), gguf_file=copy.name)
    values, names = read_gguf_metadata(str(copy))
    return AutoConfig.for_model(**get_gguf_config({**values, "tokenizer.ggml.tokens": vocabulary}, names))


def _linear(outputs: int, inputs: int, dtype: torch.dtype) -> nn.Linear:
    """A linear layer for its shape alone."""
    return nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)


def _linear_of(module: Any) -> Any:
    """A linear layer of a module's shape, with its bias; None if it is none, or has its weights already."""
    if isinstance(module, Conv1D):
        found = _linear(module.nf, module.nx, module.weight.dtype)
        found.bias = module.bias
        return found
    return module if isinstance(module, nn.Linear) else None

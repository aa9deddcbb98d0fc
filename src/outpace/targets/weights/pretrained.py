"""Draft models and tokenizers by name: loaded once, and shared by the engines that name them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from outpace.core import OutpaceError, UnsupportedModel, first_line, out_of_memory
from outpace.names import is_gguf
from outpace.targets import Target, TargetModel
from outpace.targets.inputs.unloaded import refuse_unloaded
from outpace.targets.weights.checkpoint import read_config
from outpace.targets.weights.rounded import rounded_options

# (path, dtype, device) -> the model; freed with the last engine that uses it.
_LOADED: weakref.WeakValueDictionary[tuple[str, str, str], TargetModel] = weakref.WeakValueDictionary()


def load_model(model: Any, target: TargetModel, device: str | None = None) -> TargetModel:
    """A draft model as a target: a loaded one unchanged, a named one in the target's dtype.

    Engines that name one model share its weights.

    Args:
        device: device of a named one; None for the target's.

    Raises:
        OutpaceError: transformers cannot load it, or the device cannot be used here.
        UnsupportedModel: it is an encoder-decoder model.
    """
    if not isinstance(model, str | Path):
        return _without_encoder(Target(model))
    source = str(Path(model).resolve() if Path(model).exists() else model)
    where = target.device if device is None else torch.device(device)
    key = (source, str(target.dtype), str(where))
    loaded = _LOADED.get(key)
    if loaded is None:
        if is_gguf(model):
            if device is not None:
                raise OutpaceError(f"draft_model: {model} is a GGUF file, so leave device out")
            loaded = _LOADED[key] = Target(model)
            return loaded
        found = read_model(str(model), rounded=where.type == "cpu", dtype=target.dtype)
        try:
            found = found.to(where)
        except (RuntimeError, AssertionError) as error:
            if out_of_memory(error):
                raise
            raise OutpaceError(f"draft_model: device {str(where)!r} cannot be used here: {error}") from error
        loaded = _LOADED[key] = Target(found)
    return loaded


def _without_encoder(model: TargetModel) -> TargetModel:
    """Refuse a draft model with an encoder: draft models read the text alone, without a source.

    Raises:
        UnsupportedModel: it has an encoder.
    """
    if model.has_encoder:
        raise _with_encoder(type(model.model).__name__)
    return model


def _with_encoder(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"draft_model: {name} is an encoder-decoder model, and a draft model reads no source; give a "
        "decoder-only model, or use a drafter without a model, such as reference"
    )


def read_model(
    name: str, method: str = "draft_model", decodes: bool = True, rounded: bool = False, **options: Any
) -> Any:
    """Load a transformers model, in evaluation mode, on the CPU.

    Args:
        method: the drafter's name, for messages.
        decodes: whether it is to be a target; one that cannot be is refused before its weights are read.
        rounded: read weights that are rounded by groups, for a CPU; their rows are in bfloat16.
        options: of ``from_pretrained``.

    Raises:
        OutpaceError: transformers cannot load it, or weights are missing.
        UnsupportedModel: it is an encoder-decoder model, or cannot be a target.
    """
    from transformers import AutoModelForCausalLM

    # transformers loads the decoder of some alone, which predicts poorly without its source.
    config = _read(read_config, name, method)
    if getattr(config, "is_encoder_decoder", False):
        raise _with_encoder(name)
    try:
        if decodes:
            refuse_unloaded(AutoModelForCausalLM, config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{method}: {error}") from error
    if rounded:
        options |= rounded_options(config, f"{method} {name!r}")
    read = AutoModelForCausalLM.from_pretrained
    loaded, info = _read(read, name, method, use_safetensors=True, output_loading_info=True, **options)
    refuse_incomplete(info, f"{method} {name!r}")
    return loaded


def refuse_incomplete(info: Mapping[str, Any], shown: str) -> None:
    """Refuse a model without some of its weights: transformers would put random numbers there, and only warn.

    Args:
        info: the ``output_loading_info`` of ``from_pretrained``.
        shown: the model's name for messages.

    Raises:
        OutpaceError: weights are missing; the message names some.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise OutpaceError(
            f"cannot load {shown}: its weights are incomplete; missing are {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )


def _read(read: Callable[..., Any], name: str, method: str, **options: Any) -> Any:
    try:
        return read(name, **options)
    except OutpaceError as error:
        raise type(error)(f"{method}: {error}") from error
    except Exception as error:  # transformers, the hub and a model's own code may raise anything
        if out_of_memory(error):
            raise
        raise OutpaceError(f"{method}: transformers cannot load {name!r}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """The reason why transformers cannot load a model; for wrong shapes it refers to a report of its own."""
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config describes; give the config of these weights"
    return first_line(error)


def load_tokenizer(tokenizer: Any, model: Any, needed: bool) -> Any:
    """A tokenizer that was given, by name or as an object, otherwise the one in a model's folder.

    Args:
        model: the model's name or path; or a target, whose transformers model has its name.
        needed: whether to query the hub, and to fail if there is none; otherwise only a folder is read.

    Raises:
        OutpaceError: transformers cannot load it.
    """
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    if tokenizer is None and isinstance(model, TargetModel) and model.tokenizer is not None:
        return model.tokenizer
    name = tokenizer if tokenizer is not None else _name(model)
    if not name or (tokenizer is None and not needed and not (Path(name) / "tokenizer.json").is_file()):
        return None
    return _tokenizer(str(name))


def _name(model: Any) -> str | Path | None:
    if isinstance(model, str | Path):
        return model
    name = getattr(model.model if isinstance(model, TargetModel) else model, "name_or_path", None)
    return name if isinstance(name, str) else None


@lru_cache(maxsize=8)
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers and the hub may raise anything
        raise OutpaceError(
            f"draft_model: transformers cannot load a tokenizer from {name!r}: {first_line(error)}"
        ) from error

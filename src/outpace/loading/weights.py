"""A transformers model or tokenizer by name: from the hub, a folder, or the embedded one.

Weights are read from safetensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)

from outpace.core import OutpaceError, UnsupportedModel, first_line
from outpace.hub import unreachable
from outpace.loading.placement import Place, SharedModel, Spread, devices_of, dtype_of
from outpace.names import ADAPTER, SMOLLM2, is_gguf, shown_name, source_of
from outpace.targets.cpu.linear import rounded_of
from outpace.targets.inputs.unloaded import refuse_unloaded
from outpace.targets.weights import adapters
from outpace.targets.weights.checkpoint import read_config
from outpace.targets.weights.needs import Needs, is_large, needs_of
from outpace.targets.weights.pretrained import reason_of, refuse_incomplete
from outpace.targets.weights.rounded import is_rounded, rounded_options

# Which models load besides language models of text: none, encoder-decoder models of text, of audio; of images
Encoders = bool | Literal["audio", "images"]


def needs_of_name(
    name: str | None, dtype: str, device: Place, trust_remote_code: bool = False, seq2seq: Encoders = False
) -> Needs | None:
    """Memory that a model will need; None for models of less than about a billion parameters.

    Raises:
        OutpaceError: there is no such model.
    """
    if name is None or is_gguf(name) or (Path(name).expanduser() / ADAPTER).is_file():
        return None
    source = source_of(name)
    try:
        config = read_config(source, trust_remote_code)
        if getattr(config, "is_encoder_decoder", False):
            return None
        images: Encoders = "images" if seq2seq == "images" else False
        kind, config = _kind_of(source, shown_name(name), trust_remote_code, images)
        refuse_unloaded(kind, config)
        if not is_large(config):
            return None
        own = getattr(config, "dtype", None) or torch.float32
        divided = isinstance(device, Spread) or (
            isinstance(device, SharedModel) and device.parallel == "tensor"
        )
        chosen = dtype_of(dtype, devices_of(device)[0], None if divided else own)
        return needs_of(config, chosen if isinstance(chosen, torch.dtype) else own, trust_remote_code)
    except OutpaceError:
        raise
    except Exception as error:
        raise OutpaceError(_explain(error, source, name)) from error


def own_dtype(name: str | None, trust_remote_code: bool = False) -> torch.dtype | None:
    """The dtype in a decoder-only model's config; None if there is none, or the weights are quantised.

    None too if the config cannot be read, which loading then reports.
    """
    try:
        if (base := base_of(name)) is not None:
            return own_dtype(base, trust_remote_code)
        config = read_config(source_of(name), trust_remote_code)
    except Exception:  # transformers and the hub may raise anything
        return None
    found = getattr(config, "dtype", None)
    other = getattr(config, "is_encoder_decoder", False) or getattr(config, "quantization_config", None)
    return found if isinstance(found, torch.dtype) and not other else None


def reads_rounded(name: str | None, trust_remote_code: bool = False) -> bool:
    """True if a model's weights are rounded in a way that is read here for a CPU; see ``own_dtype``."""
    try:
        return is_rounded(read_config(source_of(name), trust_remote_code))
    except Exception:  # as in ``own_dtype``
        return False


def base_of(name: str | None) -> str | None:
    """The model that a folder written by peft updates; None for any other model."""
    folder = None if name is None else Path(name).expanduser()
    if folder is None or not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return None
    return adapters.base_of(folder)


def load_weights(
    name: str | None,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    seq2seq: Encoders = False,
    rounded: bool = False,
    use: Callable[[Any], Any] | None = None,
    **more: Any,
) -> tuple[str, Any, Any]:
    """Load a transformers model, onto the CPU unless ``more`` places it elsewhere.

    Args:
        seq2seq: as for ``outpace.load``.
        rounded: read weights that are rounded by groups for a CPU, where transformers needs other packages.
        use: makes something of the model, which is returned in its place. Another thread reads the tokenizer
            meanwhile, which may take longer than the weights.
        more: arguments of ``from_pretrained``: where the weights go instead.

    Returns:
        Its name for messages, the model, and its tokenizer.

    Raises:
        OutpaceError, UnsupportedModel: as ``outpace.load``.
    """
    _silence()
    model, tokenizer = _parts(name, dtype, trust_remote_code, seq2seq, rounded=rounded, **more)
    if use is None:
        return shown_name(name), model, tokenizer()
    with ThreadPoolExecutor(1) as apart:
        reading = apart.submit(tokenizer)
        used = use(model)
    return shown_name(name), used, reading.result()


def _parts(
    name: str | None, dtype: torch.dtype | str, trust_remote_code: bool, seq2seq: Encoders, **more: Any
) -> tuple[Any, Callable[[], Any]]:
    """A model, and what reads its tokenizer. Updates in a folder of peft's are merged into their model."""
    if name is None or (base := base_of(name)) is None:
        return _read(source_of(name), shown_name(name), dtype, trust_remote_code, seq2seq, **more)
    folder = Path(name).expanduser()
    try:
        model, tokenizer = _parts(base, dtype, trust_remote_code, seq2seq, **more)
    except OutpaceError as error:
        raise OutpaceError(
            f"{name} updates the model {base}: {error}. If that model has moved, set base_model_name_or_path "
            f"in {folder / ADAPTER} to its new place"
        ) from error
    if rounded_of(model):
        raise OutpaceError(
            f"{name} updates {base}, whose weights are rounded; give a base with weights in floats"
        )
    return adapters.merge(model, folder), tokenizer


def _read(
    source: str,
    shown: str,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    seq2seq: Encoders,
    rounded: bool,
    **more: Any,
) -> tuple[Any, Callable[[], Any]]:
    try:
        kind, config = _kind_of(source, shown, trust_remote_code, seq2seq)
        refuse_unloaded(kind, config)
        if rounded and (found := rounded_options(config, shown, dtype)):
            dtype, more = found.pop("dtype"), {**more, **found}
        model = _weights(kind, source, shown, dtype, trust_remote_code, **more)
        return model, partial(_tokenizer, transformers.AutoTokenizer, source, shown, trust_remote_code)
    except (OutpaceError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers, the hub and a model's own code may raise anything
        raise OutpaceError(_explain(error, source, shown)) from error


def load_tokenizer(name: str | None = None, trust_remote_code: bool = False) -> tuple[str, Any]:
    """Load a tokenizer alone; its folder need not contain a model.

    Returns:
        Its name for messages, and the tokenizer.

    Raises:
        OutpaceError: it cannot be loaded.
    """
    _silence()
    folder = None if name is None else Path(name).expanduser()
    source = str(folder) if folder is not None and folder.is_dir() else source_of(name)
    shown = shown_name(name)
    return shown, _tokenizer(transformers.AutoTokenizer, source, shown, trust_remote_code)


def _silence() -> None:
    """Silence transformers' warnings and progress bars, but not the hub's download bars."""
    downloads = not are_progress_bars_disabled()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if downloads:
        enable_progress_bars()


def _kind_of(source: str, shown: str, trust_remote_code: bool, seq2seq: Encoders) -> tuple[Any, Any]:
    """The class that loads a model, and its config; unsupported kinds are refused before weights are read."""
    config = read_config(source, trust_remote_code)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    speech = type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    if seq2seq == "audio":
        if speech:
            return transformers.AutoModelForSpeechSeq2Seq, config
        raise UnsupportedModel(f"{shown} ({config.model_type}) reads no audio; leave --audio out")
    if getattr(config, "is_encoder_decoder", False):
        text = type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        refuse_unloaded(transformers.AutoModelForSeq2SeqLM, config)
        refuse_unloaded(transformers.AutoModelForSpeechSeq2Seq, config)
        if text and seq2seq is True:
            return transformers.AutoModelForSeq2SeqLM, config
        where = "from Python"
        if text:
            where = "with `outpace generate`, `outpace train` or `outpace bench`, or " + where
        elif speech:
            where = "with `outpace generate --audio FILE.wav`, or " + where
        raise UnsupportedModel(
            f"{shown} ({config.model_type}) is an encoder-decoder model; use it {where}: "
            "outpace.accelerate(model, drafter)"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        refuse_unloaded(transformers.AutoModelForImageTextToText, config)
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            if seq2seq == "images":
                return transformers.AutoModelForImageTextToText, config
            raise UnsupportedModel(
                f"{shown} ({config.model_type}) reads images; use it with `outpace serve`, or "
                "from Python: outpace.accelerate(model, drafter)"
            )
        raise UnsupportedModel(
            f"{shown} ({config.model_type}) is not a causal language model; outpace supports only those"
        )
    return transformers.AutoModelForCausalLM, config


def _weights(
    kind: Any, source: str, shown: str, dtype: torch.dtype | str, trust_remote_code: bool, **more: Any
) -> Any:
    loaded: Any = kind.from_pretrained(
        source,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        output_loading_info=True,
        **more,
    )
    model, info = loaded
    refuse_incomplete(info, shown)
    return model


def _tokenizer(loader: Any, source: str, shown: str, trust_remote_code: bool) -> Any:
    try:
        tokenizer = loader.from_pretrained(source, trust_remote_code=trust_remote_code)
        usable = bool(tokenizer("a b c").input_ids)
    except Exception as error:  # transformers, the hub and a tokenizer's own code may raise anything
        if isinstance(error, ImportError) and "sentencepiece" in str(error).lower():
            raise OutpaceError(
                f"the tokenizer of {shown} needs sentencepiece: pip install sentencepiece"
            ) from error
        raise OutpaceError(f"{shown} has no tokenizer that can be loaded: {first_line(error)}") from error
    if not usable:
        raise OutpaceError(f"{shown} has no usable tokenizer: it returns no tokens for a text")
    return tokenizer


def _explain(error: Exception, source: str, shown: str) -> str:
    """The reason why loading failed, and the remedy."""
    text = str(error)
    if "trust_remote_code" in text:
        return f"{shown} runs its own Python code; read it, and pass --trust-remote-code if you trust it"
    if "couldn't connect" in text.lower() or "offline" in text.lower():
        return unreachable(shown, (SMOLLM2,))
    if "safetensors" in text and isinstance(error, OSError):
        return (
            f"cannot load {shown}: it has no weights in safetensors format, the only one that outpace loads; "
            "convert them with model.save_pretrained(folder)"
        )
    where = "" if Path(source).is_dir() else " (no such folder, so it was looked up on the hub)"
    return f"cannot load {shown}{where}: {reason_of(error)}"

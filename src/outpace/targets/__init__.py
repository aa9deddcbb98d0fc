"""Models that verify drafts. ``Target(model)`` picks the class.

From the bottom: ``base`` is the contract; ``inputs`` is what a stock forward is given; ``cpu`` and ``gpu``
are faster modules with the same weights; ``step`` chooses among them and tests the choice; ``stock`` makes
targets of transformers models, ``llamacpp`` of GGUF files; ``combined`` and ``ranks`` make targets of other
targets; ``weights`` finds a model's files.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError, TargetOptions, UnsupportedModel, need
from outpace.hub import local
from outpace.names import is_gguf
from outpace.targets.base import TargetModel
from outpace.targets.inputs.config import is_multimodal
from outpace.targets.inputs.refusals import keeps_states
from outpace.targets.inputs.wrapped import unwrapped
from outpace.targets.rows import Output, Rows
from outpace.targets.stock.causal import CausalTarget
from outpace.targets.stock.multimodal import MultimodalTarget
from outpace.targets.stock.recurrent import RecurrentTarget
from outpace.targets.stock.seq2seq import Seq2SeqTarget

__all__ = [
    "CausalTarget",
    "MultimodalTarget",
    "Output",
    "RecurrentTarget",
    "Rows",
    "Seq2SeqTarget",
    "Target",
    "TargetModel",
    "of_file",
]


def Target(model: Any, **options: Any) -> TargetModel:  # noqa: N802 - reads as the class it picks
    """A target for a model: a function, because its class depends on the model.

    Args:
        model: a transformers model, decoder-only (with images or without) or encoder-decoder, perhaps in
            PEFT's wrapper; the path of a GGUF file, which llama.cpp runs if it is not read here, or if
            options are llama.cpp's; or a target, which is returned.
        options: options of the chosen class; see ``TargetOptions``, ``Seq2SeqTarget``, ``LlamaCppOptions``.

    Raises:
        UnsupportedModel: the model cannot verify drafts, or its cache cannot be rolled back; the message
            names the reason.
    """
    if isinstance(model, TargetModel):
        if options:
            raise OutpaceError(f"a target's options are given when it is made: {', '.join(options)}")
        return model
    if isinstance(model, str | Path):
        if not is_gguf(model):
            raise UnsupportedModel(
                f"{str(model)!r} is not a GGUF file; pass a loaded model, or use outpace.load({str(model)!r})"
            )
        return of_file(Path(local(model)), **options)
    model = unwrapped(model)
    config = getattr(model, "config", None)
    if config is None or not callable(model):
        raise UnsupportedModel(f"a {type(model).__name__} is not a transformers model; pass a loaded model")
    if getattr(config, "is_encoder_decoder", False):
        asked = TargetOptions.of(options, "Target()")
        stock = asked.of_step["plan"] in (None, "stock")  # as they all run
        if names := [name for name in asked.named if name != "check" and not (name == "plan" and stock)]:
            raise OutpaceError(f"{names[0]} is for decoder-only models: leave it out")
        return Seq2SeqTarget(model, asked.check)
    if is_multimodal(config):
        return MultimodalTarget(model, **options)
    if keeps_states(model):
        return RecurrentTarget(model, **options)
    return CausalTarget(model, **options)


def of_file(
    path: Path,
    dtype: str = "auto",
    others: bool = True,
    updated: Callable[[Any], Any] | None = None,
    **options: Any,
) -> TargetModel:
    """A target of a GGUF file, by compiled functions, or by llama.cpp.

    Args:
        dtype: of its rows: "auto" is bfloat16, or float32 where some matrices are in floats.
        others: llama.cpp runs what is not read here.
        updated: merges low-rank updates into the model.
        options: as for ``Target``.

    Raises:
        UnsupportedModel: neither runs it; the message has both reasons.
    """
    from outpace.targets.gguf import GgufFile, tokenizer_of
    from outpace.targets.llamacpp import LlamaCppTarget

    if set(options) - {one.name for one in fields(TargetOptions)}:
        return LlamaCppTarget(path, **options)
    try:
        file = GgufFile(path)
        with ThreadPoolExecutor(1) as apart:
            reading = apart.submit(tokenizer_of(file))
            model = file.model(dtype)
            target = Target(model if updated is None else updated(model), **options)
        target.tokenizer = reading.result()
        return target
    except UnsupportedModel as error:
        why = f"outpace does not read {path}: {error}"
        if updated is not None:
            raise UnsupportedModel(f"{why}; and low-rank updates of it are merged here alone") from error
        if not others:
            raise UnsupportedModel(f"{why}; leave --backend native out for llama.cpp") from error
        try:
            need("llamacpp", "llama.cpp")
            return LlamaCppTarget(path)
        except OutpaceError as second:
            raise type(second)(f"{why}; nor does llama.cpp: {second}") from error

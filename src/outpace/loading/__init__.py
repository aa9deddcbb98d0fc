"""A model, its tokenizer and its chat template by name, for the command line and the server."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError, TargetOptions, dtype_name
from outpace.hub import local
from outpace.loading.loaded import Loaded, load_here
from outpace.loading.placement import Place, Shared, Spread, check_needs
from outpace.loading.shared import load_shared
from outpace.loading.weights import Encoders, needs_of_name
from outpace.names import check_llamacpp, check_model, is_gguf
from outpace.spec import load as load_spec

__all__ = ["Loaded", "load"]


def load(
    name: str | Path | None = None,
    dtype: str | Any = "auto",
    device: Place = None,
    *,
    trust_remote_code: bool = False,
    llamacpp: str = "",
    seq2seq: Encoders = False,
    **options: Any,
) -> Loaded:
    """Load a model for decoding.

    With several processes, all of them call this. It returns in the first; the others serve the first until
    it ends, and then exit (``SystemExit``).

    Args:
        name: a hub name, a folder, or a .gguf file, which llama.cpp runs (its weights keep their types);
            None is the embedded model, "smollm2" the public one that `outpace pull smollm2` fetches,
            "owner/name:QUANT" a GGUF file on the hub. The low-rank updates in a folder written by peft are
            merged into the model that they update. On a CPU weights that GPTQ, AWQ or compressed-tensors
            have rounded by groups stay so, in compiled products (docs/reference/models.md).
        dtype: one of ``DTYPES``, a short name (fp16, bf16), torch's dtype, or "auto": the model's own on a
            GPU; on a CPU bfloat16 if that is the model's own and steps in it are bit-exact here, otherwise
            float32. ``target.plan`` says which.
        device: in torch's notation; None is cuda if available; or several devices or processes.
        trust_remote_code: run Python code that comes with the model.
        llamacpp: options of a .gguf file, fields of ``LlamaCppOptions``, as in "threads=4,n_gpu_layers=-1".
        seq2seq: load an encoder-decoder model of text too (T5, BART, Marian), which is otherwise refused:
            ``loaded.target.parts(loaded.tokens(text))`` is the prompt and the source for its engine.
            "audio": load a model of speech (Whisper), and no other. "images": load a model of text and images
            too (Llava, Qwen2-VL), with its processor in ``loaded.images``.
        options: fields of ``TargetOptions``, such as quantise="int8".

    Raises:
        OutpaceError: the model cannot be loaded; the message gives the reason and the remedy.
        UnsupportedModel: it is not a language model of a supported kind, or fails the target's
            self-test.
        RanksLost: one of several processes has failed.
    """
    chosen = TargetOptions.of(options, "load()", signature(load).parameters)
    dtype = dtype_name(dtype)
    if name is not None:
        if not isinstance(name, str | Path):
            raise OutpaceError(
                f"load() takes a name or a folder, not a {type(name).__name__}; for a model in memory, use "
                "outpace.accelerate(model) or outpace.Engine(model)"
            )
        name = str(name)
    if name is not None and is_gguf(name):
        return _load_gguf(name, dtype, device, trust_remote_code, llamacpp, seq2seq, chosen)
    if not isinstance(device, Shared):  # of several processes the first one has looked
        check_model(name)
    check_llamacpp(name, llamacpp)
    check_needs(name, needs_of_name(name, dtype, device, trust_remote_code, seq2seq), device)
    if isinstance(device, Shared):
        if chosen.stock:
            raise OutpaceError("several processes divide the model's steps; leave --stock or --parallel out")
        if names := [one for one in chosen.named if one != "quantise"]:
            raise OutpaceError(f"{names[0]} is for a model in one process, not in several; leave it out")
        return load_shared(name, dtype, device, trust_remote_code, chosen.quantise)
    return load_here(name, dtype, device, trust_remote_code, seq2seq, chosen)


def _load_gguf(
    name: str,
    dtype: str,
    device: Place,
    trust: bool,
    llamacpp: str,
    seq2seq: Encoders,
    options: TargetOptions,
) -> Loaded:
    """A GGUF file as a loaded model: with the tokenizer and the chat template in it."""
    place = "--device-map" if isinstance(device, Spread) else "--device"
    for given, option, remedy in (
        (dtype != "auto", "--dtype", "weights have the types they have in the file"),
        (device not in (None, "cpu"), place, "give --llamacpp n_gpu_layers=-1 for all layers on the GPU"),
        (trust, "--trust-remote-code", "a GGUF file contains no code"),
        (options.quantise is not None, "--quantise", "weights have the types they have in the file"),
        (options.stock, "--stock", "llama.cpp runs it"),
        (seq2seq == "audio", "--audio", "it reads text"),
        (options.release is True, "release", "there is one copy of its weights"),
        *((True, one, "llama.cpp has options of its own, --llamacpp") for one in options.named),
    ):
        if given:
            raise OutpaceError(f"{option} is for transformers models, and {name} is a GGUF file: {remedy}")
    from outpace.targets.llamacpp import LlamaCppOptions, LlamaCppTarget

    chosen = load_spec(
        "option of a GGUF file", {"llamacpp": LlamaCppOptions}, f"llamacpp:{llamacpp}".rstrip(":")
    )
    target = LlamaCppTarget(local(name), **vars(chosen))
    target.tokenizer.need_text()
    return Loaded(name, target, target.tokenizer, target.file_type.lower(), "cpu", str(target.path))

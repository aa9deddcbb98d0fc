"""A model, its tokenizer and its chat template by name, for the command line and the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError, TargetOptions, dtype_name, uncollected
from outpace.hub import local
from outpace.loading.loaded import Loaded, load_here
from outpace.loading.placement import Place, SharedModel, Spread, check_needs
from outpace.loading.shared import load_shared
from outpace.loading.updates import merge
from outpace.loading.weights import Encoders, base_of, needs_of_name
from outpace.names import Backend, check_backend, check_llamacpp, check_model, is_gguf
from outpace.spec import load as load_spec
from outpace.targets import of_file
from outpace.targets.llamacpp import LlamaCppOptions, LlamaCppTarget

__all__ = ["Loaded", "load"]


@uncollected()
def load(
    name: str | Path | None = None,
    dtype: str | Any = "auto",
    device: Place = None,
    *,
    trust_remote_code: bool = False,
    llamacpp: str = "",
    backend: Backend = "auto",
    seq2seq: Encoders = False,
    **options: Any,
) -> Loaded:
    """Load a model for decoding.

    With several processes, all of them call this. It returns in the first; the others serve the first until
    it ends, and then exit (``SystemExit``).

    Args:
        name: a hub name, a folder, or a .gguf file, whose weights keep their types;
            None is the embedded model, "smollm2" the public one that `outpace pull smollm2` fetches,
            "owner/name:QUANT" a GGUF file on the hub. The low-rank updates in a folder written by peft are
            merged into the model that they update. On a CPU weights that GPTQ, AWQ or compressed-tensors
            have rounded by groups stay so, in compiled products (docs/reference/models.md).
        dtype: one of ``DTYPES``, a short name (fp16, bf16), torch's dtype, or "auto": the model's own on a
            GPU; on a CPU bfloat16 if that is the model's own and steps in it are bit-exact here, otherwise
            float32. ``target.plan`` says which.
        device: in torch's notation; None is cuda if available; or several devices or processes.
        trust_remote_code: run Python code that comes with the model.
        llamacpp: options of a .gguf file that llama.cpp runs, fields of ``LlamaCppOptions``, as in
            "threads=4,n_gpu_layers=-1".
        backend: what runs a .gguf file: "native", outpace's own functions, on a CPU; "llamacpp"; or "auto",
            llama.cpp for what the first does not read, and if ``llamacpp`` has options.
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
    check_backend(name, backend, llamacpp)
    check_llamacpp(name, llamacpp)
    if name is not None and is_gguf(base := base_of(name) or name):
        asked = _GgufArguments(name, dtype, device, trust_remote_code, seq2seq, chosen)
        if llamacpp or backend == "llamacpp":
            return _by_llamacpp(asked, llamacpp)
        return _of_file(asked, base, others=backend == "auto")
    if not isinstance(device, SharedModel):  # of several processes the first one has looked
        check_model(name)
    check_needs(name, needs_of_name(name, dtype, device, trust_remote_code, seq2seq), device)
    if isinstance(device, SharedModel):
        if chosen.stock:
            raise OutpaceError("several processes divide the model's steps; leave --stock or --parallel out")
        if names := [one for one in chosen.named if one != "quantise"]:
            raise OutpaceError(f"{names[0]} is for a model in one process, not in several; leave it out")
        return load_shared(name, dtype, device, trust_remote_code, chosen.quantise)
    return load_here(name, dtype, device, trust_remote_code, seq2seq, chosen)


@dataclass(frozen=True)
class _GgufArguments:
    """What was asked for a GGUF file: arguments of ``load``."""

    name: str
    dtype: str
    device: Place
    trust: bool
    seq2seq: Encoders
    options: TargetOptions

    def check(self, more: Iterable[tuple[bool, str, str]]) -> None:
        """Refuse arguments that a GGUF file does not take.

        Args:
            more: whether one was given, its name, and what to do instead.
        """
        place = "--device-map" if isinstance(self.device, Spread) else "--device"
        for given, option, remedy in (
            (
                self.device not in (None, "cpu"),
                place,
                "give --llamacpp n_gpu_layers=-1 for all layers on the GPU",
            ),
            (self.trust, "--trust-remote-code", "a GGUF file contains no code"),
            (self.options.quantise is not None, "--quantise", "weights have the types they have in the file"),
            (self.seq2seq == "audio", "--audio", "it reads text"),
            *more,
        ):
            if given:
                raise OutpaceError(
                    f"{option} is for transformers models, and {self.name} is a GGUF file: {remedy}"
                )


def _of_file(asked: _GgufArguments, base: str, others: bool) -> Loaded:
    """A GGUF file by compiled functions.

    Args:
        base: the file; another name than the one that was asked for is a folder of its low-rank updates.
        others: llama.cpp may run it if these do not read it.
    """
    floats = ("auto", "float32", "bfloat16")
    asked.check([(asked.dtype not in floats, "--dtype", "rows are in float32 or bfloat16")])
    path = Path(local(base)).expanduser()
    updates = None if base == asked.name else Path(asked.name).expanduser()
    updated = None if updates is None else partial(merge, folder=updates)
    target = of_file(path, asked.dtype, others, updated, **vars(asked.options))
    if isinstance(target, LlamaCppTarget):
        return _loaded(asked.name, target)
    if target.tokenizer is None:
        raise OutpaceError(f"{asked.name} has no tokenizer, and texts need one")
    dtype = str(target.dtype).removeprefix("torch.")
    return Loaded(asked.name, target, target.tokenizer, dtype, "cpu", str(updates or path))


def _by_llamacpp(asked: _GgufArguments, llamacpp: str) -> Loaded:
    """A GGUF file by llama.cpp, with the tokenizer and the chat template in it."""
    asked.check(
        [
            (asked.dtype != "auto", "--dtype", "weights have the types they have in the file"),
            (asked.options.stock, "--stock", "llama.cpp runs it"),
            *(
                (True, one, "llama.cpp has options of its own, --llamacpp")
                for one in asked.options.named
                if one not in ("quantise", "stock")
            ),
        ]
    )
    chosen = load_spec(
        "option of a GGUF file", {"llamacpp": LlamaCppOptions}, f"llamacpp:{llamacpp}".rstrip(":")
    )
    return _loaded(asked.name, LlamaCppTarget(local(asked.name), **vars(chosen)))


def _loaded(name: str, target: LlamaCppTarget) -> Loaded:
    target.tokenizer.need_text()
    return Loaded(name, target, target.tokenizer, target.file_type.lower(), "cpu", str(target.path))

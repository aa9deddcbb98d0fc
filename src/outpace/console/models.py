"""A model and its tokenizer from the hub or a folder, the way transformers loads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outpace.bench.lab.growth import grow
from outpace.bench.lab.llama_shapes import load_shape
from outpace.core import ContextOverflow, OutpaceError, UnsupportedModel
from outpace.drafters.base import Drafter
from outpace.embedded import nano_path
from outpace.engine.engine import Engine
from outpace.engine.parts import Adaptive
from outpace.files import check_text
from outpace.targets import Target, TargetModel
from outpace.targets.pretrained import refuse_incomplete
from outpace.train import Online, lora
from outpace.verify import Verifier

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Loaded:
    """A model that passed the target's self-test, its tokenizer, and how to say what it is.

    ``source`` is the folder or the hub's name that it can be loaded from; "" for one that is in memory alone.
    ``grown`` is the name of the shape that it was grown to in memory.
    """

    name: str
    target: TargetModel
    tokenizer: Any
    dtype: str
    device: str
    source: str = ""
    grown: str | None = None

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype} on {self.device}"

    def engine(
        self,
        drafter: Drafter[Any] | str | None = None,
        verifier: Verifier | str = "match",
        slots: int = 1,
        adaptive: Adaptive | None = None,
        online: Online | None = None,
    ) -> Engine:
        """An engine of its own on this model.

        Args:
            adaptive: as for ``Engine``; None, a flag that was not given, is ``"auto"``.
            online: made with this drafter, which then learns.
        """
        return Engine(
            self.target,
            drafter if online is None else online.drafter,
            verifier,
            self.tokenizer,
            adaptive="auto" if adaptive is None else adaptive,
            observer=online,
            slots=slots,
        )

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, however long.

        Raises:
            OutpaceError: it has half a character.
        """
        check_text(text)
        return list(self.tokenizer(text).input_ids)

    def plain_tokens(self, text: str) -> list[int]:
        """Token ids of a text as it may stand within another: without tokens that begin or end one."""
        check_text(text)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Token ids of a prompt, as it is or as a user's turn of a chat.

        Raises:
            OutpaceError: no tokens, more than the context, or no chat template.
        """
        ids = self.encode_chat([{"role": "user", "content": text}]) if chat else self.tokens(text)
        if not ids:
            raise OutpaceError("the prompt is empty: it has no tokens")
        context = self.target.context
        if context is not None and len(ids) > context:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens, the model's context {context}; shorten the prompt"
            )
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, however long, up to where the answer begins."""
        if not self.has_template:
            raise OutpaceError(f"{self.name} has no chat template; leave --chat out")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template may raise anything
            raise OutpaceError(f"the chat template of {self.name} failed: {_first_line(error)}") from error
        return self.plain_tokens(text)


def load(
    name: str | None = None,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    like: str | None = None,
) -> Loaded:
    """Load a model for decoding.

    Args:
        name: a hub name or a folder, also one of peft's, with updates of a model, which are merged into it;
            None is the embedded model.
        device: as torch writes it; None is cuda where there is one.
        dtype: ``auto`` is the model's own on a GPU and float32 on a CPU.
        trust_remote_code: run code that comes with the model.
        like: the name of a shape that the model is grown to, on the device itself.

    Raises:
        OutpaceError: it cannot be loaded; the message says why and what to do.
    """
    place = _device(device)
    wanted = _dtype(dtype, place)
    shape = None if like is None else load_shape(like)
    shown, model, tokenizer = load_weights(name, wanted, trust_remote_code)
    source = _source(name)
    if shape is None:
        model = model.to(place)
    else:
        model = grow(model, shape, place)
        shown, source = f"{shown} grown to {like}", ""
    kind = str(model.dtype).removeprefix("torch.")
    return Loaded(shown, Target(model), tokenizer, kind, str(place), source, like)


def load_weights(name: str | None, dtype: torch.dtype | str, trust_remote_code: bool) -> tuple[str, Any, Any]:
    """A model's name, the transformers model itself, on the CPU, and its tokenizer.

    Raises:
        OutpaceError: as ``load``.
    """
    _silence()
    source = _source(name)
    shown = Path(source).name if name is None else name
    return shown, *_parts(name, dtype, trust_remote_code)


def _parts(name: str | None, dtype: torch.dtype | str, trust_remote_code: bool) -> tuple[Any, Any]:
    """A model and its tokenizer; of a folder of peft's, the model that it updates, with these merged."""
    folder = None if name is None else Path(name).expanduser()
    if folder is not None and (folder / lora.ADAPTER).is_file() and not (folder / "config.json").is_file():
        base = lora.base_of(folder)
        try:
            model, tokenizer = _parts(base, dtype, trust_remote_code)
        except OutpaceError as error:
            raise OutpaceError(
                f"{name} updates the model {base}: {error}. If that lies elsewhere now, say where in "
                f"{folder / lora.ADAPTER}, as base_model_name_or_path"
            ) from error
        return lora.merge(model, folder), tokenizer
    source = _source(name)
    shown = Path(source).name if name is None else name
    try:
        _check_family(source, shown, trust_remote_code)
        model = _weights(source, shown, dtype, trust_remote_code)
        return model, _tokenizer(source, shown, trust_remote_code)
    except (OutpaceError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever transformers, the hub and a model's own code may raise
        raise OutpaceError(_explain(error, source, shown)) from error


def load_tokenizer(name: str | None = None, trust_remote_code: bool = False) -> tuple[str, Any]:
    """A tokenizer's name and the tokenizer alone, of a model or from a folder that holds nothing else.

    Raises:
        OutpaceError: it cannot be loaded.
    """
    _silence()
    folder = None if name is None else Path(name).expanduser()
    source = str(folder) if folder is not None and folder.is_dir() else _source(name)
    shown = Path(source).name if name is None else name
    return shown, _tokenizer(source, shown, trust_remote_code)


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OutpaceError(f"device {device!r} cannot be used here: {_first_line(error)}") from None
    return place


def _dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise OutpaceError(f"unknown dtype {dtype!r}; there are: auto, {', '.join(DTYPES)}")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def _silence() -> None:
    """No warnings or bars of transformers'; a download from the hub still shows its own."""
    downloads = not are_progress_bars_disabled()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if downloads:
        enable_progress_bars()


def _source(name: str | None) -> str:
    """Where to load from: an existing folder as a path, else a hub name."""
    if name is None:
        if not (nano_path() / "config.json").is_file():
            raise OutpaceError(
                "the embedded model is missing from this installation; reinstall outpace, or give --model"
            )
        return str(nano_path())
    if not name.strip():
        raise OutpaceError("the model's name is empty; give a folder or a name on the Hugging Face hub")
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", lora.ADAPTER)):
            raise OutpaceError(f"{name} is no model: the folder has no config.json")
        return str(path)
    if path.exists():
        raise OutpaceError(f"{name} is a file; give the folder that holds config.json and the weights")
    if _looks_like_path(name):
        raise OutpaceError(f"no such folder: {name}")
    return name


def _looks_like_path(name: str) -> bool:
    """Whether a name cannot be one of the hub's, which is ``name`` or ``owner/name``."""
    separators = name.count("/") + name.count(os.sep) * (os.sep != "/")
    return name.startswith((".", "/", "~", os.sep)) or separators > 1 or name.endswith(("/", os.sep))


def _check_family(source: str, shown: str, trust_remote_code: bool) -> None:
    """Refuse a model that is no decoder-only language model, before its weights are read."""
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{shown} ({config.model_type}) is an encoder-decoder model, and the command line has no place "
            "for its source; in Python it is outpace.Engine(model, drafter).generate(prompts, sources=...)"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        raise UnsupportedModel(
            f"{shown} ({config.model_type}) is no causal language model; only such models are supported"
        )


def _weights(source: str, shown: str, dtype: torch.dtype | str, trust_remote_code: bool) -> Any:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        output_loading_info=True,
    )
    model, info = loaded
    refuse_incomplete(info, shown)
    return model


def _tokenizer(source: str, shown: str, trust_remote_code: bool) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        usable = bool(tokenizer("a b c").input_ids)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise OutpaceError(f"{shown} has no tokenizer that can be loaded: {_first_line(error)}") from error
    if not usable:
        raise OutpaceError(f"{shown} has no usable tokenizer: it makes no tokens of text")
    return tokenizer


def _explain(error: Exception, source: str, shown: str) -> str:
    """What went wrong while loading, and the remedy."""
    text = str(error)
    if "trust_remote_code" in text:
        return f"{shown} brings code of its own; read it, and pass --trust-remote-code if you trust it"
    if "couldn't connect" in text.lower() or "offline" in text.lower():
        return (
            f"cannot load {shown}: there is no such folder, it is not in the local cache, and the Hugging "
            f"Face hub cannot be reached. Fetch it with a network (hf download {shown}), or give a folder"
        )
    if "safetensors" in text and isinstance(error, OSError):
        return (
            f"cannot load {shown}: no weights in safetensors format, and outpace loads no others; "
            "convert them with model.save_pretrained(folder)"
        )
    where = "" if Path(source).is_dir() else " (no such folder here, so it was looked for on the hub)"
    return f"cannot load {shown}{where}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" :") if lines else type(error).__name__

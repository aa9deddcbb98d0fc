"""Loading of a model, its tokenizer and its chat template by name, from the hub or a folder, by transformers.

Used by the command line and the server. Weights are read from safetensors only.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outpace.core import ContextOverflow, OutpaceError, UnsupportedModel
from outpace.drafters.base import Drafter
from outpace.embedded import nano_path, smollm2_path
from outpace.engine.engine import Engine
from outpace.engine.observer import Observer
from outpace.engine.parts import Adaptive
from outpace.files import check_text
from outpace.policy.governor import Governor
from outpace.policy.latency import Latency
from outpace.spec import load as load_spec
from outpace.targets import Target, TargetModel, adapters, is_gguf
from outpace.targets.hardware import total_bytes
from outpace.targets.led import LedTarget, follow
from outpace.targets.needs import GIB, Needs, is_large, needs_of
from outpace.targets.parallel import ParallelTarget, deal, typical
from outpace.targets.pretrained import refuse_incomplete
from outpace.targets.ranks import Ranks
from outpace.verify import Verifier

_NEVER = 1 << 30  # rows
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Shared:
    """Several processes that share one model.

    Attributes:
        ranks: this process's membership in the group.
        parallel: ``"draft"``: each has the whole model and verifies a share of every draft; ``"tensor"``:
            each has a part of every layer, by the model's own plan (transformers' ``tp_plan="auto"``).
    """

    ranks: Ranks
    parallel: Literal["draft", "tensor"]


@dataclass(frozen=True)
class Spread:
    """Several devices of this process, which share a model's layers.

    Attributes:
        layers: a device map in accelerate's format: ``"auto"``, ``"balanced"``, ``"sequential"``, or
            module -> device.
    """

    layers: str | Mapping[str, int | str]

    @classmethod
    def of(cls, text: str) -> Spread:
        """Parse a device map: a name, or JSON as in '{"model.layers.0": 0, "": "cpu"}'.

        Raises:
            OutpaceError: it is neither, or accelerate is missing.
        """
        if importlib.util.find_spec("accelerate") is None:
            raise OutpaceError("a device map needs accelerate: pip install 'outpace[devices]'")
        if text in _MAPS:
            return cls(text)
        try:
            layers = json.loads(text)
        except ValueError:
            layers = None
        if not isinstance(layers, dict) or not layers:
            raise OutpaceError(
                f"a device map must be {', '.join(_MAPS)}, or JSON from module to device, as in "
                f'\'{{"model.layers.0": 0, "": "cpu"}}\'; not {text!r}'
            )
        if "disk" in layers.values():
            raise OutpaceError("weights on disk would be read in every step; put those modules on cpu")
        return cls(layers)

    @property
    def devices(self) -> list[torch.device]:
        """The devices that layers may be placed on.

        Raises:
            OutpaceError: one cannot be used here.
        """
        if isinstance(self.layers, str):
            gpus = [torch.device("cuda", place) for place in range(torch.cuda.device_count())]
            return [*gpus, torch.device("cpu")]
        named = (f"cuda:{place}" if isinstance(place, int) else place for place in self.layers.values())
        return [device_of(name) for name in dict.fromkeys(named)]


# Placement of a model: a device in torch's notation, None for cuda if available; several devices; or
# several processes.
Place = str | Spread | Shared | None


@dataclass(frozen=True)
class Loaded:
    """A model that passed the target's self-test, with its tokenizer and chat template.

    Attributes:
        name: the hub name or folder as the user gave it, for messages and reports.
        target: the model as the engine's target.
        tokenizer: transformers' tokenizer.
        dtype, device: in torch's notation, e.g. "bfloat16" and "cuda:0".
        source: the folder or hub name from which another process can load the model; "" if there is none.
        costs: measured costs from a profile, the initial costs of governors.
    """

    name: str
    target: TargetModel
    tokenizer: Any
    dtype: str
    device: str
    source: str = ""
    costs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype} on {self.device}"

    def engine(
        self,
        drafter: Drafter[Any] | str | None = None,
        verifier: Verifier | str = "match",
        slots: int = 1,
        adaptive: Adaptive = "auto",
        observer: Observer | None = None,
        **more: Any,
    ) -> Engine:
        """A new engine on this model; the arguments are those of ``Engine``."""
        parts = self.target, drafter, verifier, self.tokenizer
        engine = Engine(*parts, adaptive=adaptive, observer=observer, slots=slots, **more)
        if self.costs and isinstance(engine.governor, Governor):
            engine.governor.begin_with(self.costs)
        return engine

    @property
    def has_template(self) -> bool:
        """True if there is a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text of any length, with the tokenizer's special tokens at its ends.

        Raises:
            OutpaceError: the text contains an unpaired surrogate.
        """
        check_text(text)
        return list(self.tokenizer(text).input_ids)

    def plain_tokens(self, text: str) -> list[int]:
        """Token ids of a part of a text: without special tokens at its ends.

        Raises:
            OutpaceError: as ``tokens``.
        """
        check_text(text)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
            chat: whether the text is a user's turn, to be put into the chat template.

        Raises:
            OutpaceError: the prompt has no tokens or exceeds the context, or there is no chat template.
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

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation of any length, up to where the answer begins.

        Args:
            messages, options: as for ``render``.

        Raises:
            OutpaceError: as ``render`` and ``tokens``.
        """
        return self.plain_tokens(self.render(messages, **options))

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """A conversation in the model's chat template, up to where the answer begins.

        Args:
            messages: dicts with "role" and "content".
            options: passed to the template, such as ``tools`` or ``add_generation_prompt=False``.

        Raises:
            OutpaceError: there is no chat template, or it rejects the messages.
        """
        if not self.has_template:
            raise OutpaceError(f"{self.name} has no chat template; leave --chat out")
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, **{"add_generation_prompt": True, **options}
            )
        except Exception as error:  # a template may raise anything
            raise OutpaceError(f"the chat template of {self.name} failed: {first_line(error)}") from error
        return text


def load(
    name: str | None = None,
    dtype: str = "auto",
    device: Place = None,
    *,
    trust_remote_code: bool = False,
    llamacpp: str = "",
) -> Loaded:
    """Load a model for decoding.

    With several processes, all of them call this. It returns in the first; the others serve the first until
    it ends, and then exit (``SystemExit``).

    Args:
        name: a hub name, a folder, or a .gguf file, which llama.cpp runs (its weights keep their types);
            None is the embedded model, "smollm2" the public model that `make real` fetches. The low-rank
            updates in a folder written by peft are merged into the model that they update.
        dtype: one of ``DTYPES``, or "auto": the model's own on a GPU, float32 on a CPU.
        device: in torch's notation; None is cuda if available; or several devices or processes.
        trust_remote_code: run Python code that comes with the model.
        llamacpp: options of a .gguf file, fields of ``LlamaCppOptions``, as in "threads=4,n_gpu_layers=-1".

    Raises:
        OutpaceError: the model cannot be loaded; the message gives the reason and the remedy.
        UnsupportedModel: it is not a decoder-only language model, or fails the target's self-test.
        RanksLost: one of several processes has failed.
    """
    if name is not None and is_gguf(name):
        return _load_gguf(name, dtype, device, trust_remote_code, llamacpp)
    if llamacpp:
        raise OutpaceError(f"--llamacpp is for .gguf files, and {_shown(name)} is none; leave it out")
    check_needs(name, needs_of_name(name, dtype, device, trust_remote_code), device)
    if isinstance(device, Shared):
        return _load_shared(name, dtype, device, trust_remote_code)
    if isinstance(device, Spread):
        chosen = dtype_of(dtype, device.devices[0])
        shown, model, tokenizer = load_weights(name, chosen, trust_remote_code, device_map=device.layers)
        return made(shown, model, tokenizer, source=source_of(name))
    place = device_of(device)
    shown, model, tokenizer = load_weights(name, dtype_of(dtype, place), trust_remote_code)
    return made(shown, model.to(place), tokenizer, source=source_of(name))


def _load_gguf(name: str, dtype: str, device: Place, trust: bool, options: str) -> Loaded:
    """A GGUF file as a loaded model: with the tokenizer and the chat template in it."""
    place = "--device-map" if isinstance(device, Spread) else "--device"
    for given, option, remedy in (
        (dtype != "auto", "--dtype", "weights have the types they have in the file"),
        (device not in (None, "cpu"), place, "say --llamacpp n_gpu_layers=-1 for all layers on the GPU"),
        (trust, "--trust-remote-code", "a GGUF file holds no code"),
    ):
        if given:
            raise OutpaceError(f"{option} is for transformers models, and {name} is a GGUF file: {remedy}")
    from outpace.targets.llamacpp import LlamaCppOptions, LlamaCppTarget

    chosen = load_spec(
        "option of a GGUF file", {"llamacpp": LlamaCppOptions}, f"llamacpp:{options}".rstrip(":")
    )
    target = LlamaCppTarget(name, **vars(chosen))
    target.tokenizer.need_text()
    return Loaded(name, target, target.tokenizer, target.file_type.lower(), "cpu", str(target.path))


def needs_of_name(
    name: str | None, dtype: str, device: Place, trust_remote_code: bool = False
) -> Needs | None:
    """Memory that a model will need; None for models of less than about a billion parameters.

    Raises:
        OutpaceError: there is no such model.
    """
    if name is None or is_gguf(name) or (Path(name).expanduser() / adapters.ADAPTER).is_file():
        return None
    source = source_of(name)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        if getattr(config, "is_encoder_decoder", False) or not is_large(config):
            return None
        chosen = dtype_of(dtype, _devices(device)[0])
        own = getattr(config, "dtype", None) or torch.float32
        return needs_of(config, chosen if isinstance(chosen, torch.dtype) else own, trust_remote_code)
    except OutpaceError:
        raise
    except Exception as error:
        raise OutpaceError(_explain(error, source, name)) from error


def _devices(place: Place) -> list[torch.device]:
    if isinstance(place, Spread):
        return place.devices
    return [device_of(place if isinstance(place, str) else None)]


def check_needs(name: str | None, needs: Needs | None, place: Place) -> None:
    """Refuse a model whose weights exceed the available memory.

    Raises:
        OutpaceError: it does not fit; the message gives both sizes and the remedy.
    """
    memory = [total_bytes(device) for device in _devices(place)] if needs is not None else []
    if needs is None or None in memory:
        return
    room, here = sum(filter(None, memory)), needs.weights
    if isinstance(place, Shared):
        alone = place.parallel == "draft"  # each process has the whole model
        on_host = _devices(place)[0].type == "cpu"  # whose memory all processes share
        here = needs.weights * (place.ranks.size if alone else 1) if on_host else needs.weights
        here = here if alone or on_host else needs.weights // place.ranks.size
    if here > room:
        gib = room / GIB
        raise OutpaceError(
            f"{name} does not fit: {needs}; there are {gib:.1f} GiB here. Divide it: --device-map auto over "
            "the GPUs and the memory of this machine, or torchrun --nproc-per-node N with --parallel tensor "
            f"over N GPUs (of this size at least {-(-needs.weights * 5 // (room * 4))}); or load it in fewer "
            "bits: --dtype bfloat16"
        )


def _load_shared(name: str | None, dtype: str, shared: Shared, trust_remote_code: bool) -> Loaded:
    ranks = shared.ranks
    try:
        loaded, target = _part_of(name, dtype, shared, trust_remote_code)
    except Exception as error:
        raise ranks.lost(error) from error
    ranks.ready()
    if not ranks.leads:
        follow(target, ranks)
        raise SystemExit(0)
    return replace(loaded, target=LedTarget(target, ranks))


def _part_of(
    name: str | None, dtype: str, shared: Shared, trust_remote_code: bool
) -> tuple[Loaded, TargetModel]:
    """This rank's part of a model."""
    own = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    if shared.parallel == "draft":
        loaded = load(name, dtype, own, trust_remote_code=trust_remote_code)
        shares = ParallelTarget(loaded.target, shared.ranks)
        latency = latency_of(shares)
        shares.least = 1 + latency.pays_from if latency.pays_from is not None else _NEVER
        return replace(loaded, costs=latency.costs()), shares
    _silence()
    source, chosen = source_of(name), dtype_of(dtype, torch.device(own))
    if name is not None and (Path(name).expanduser() / adapters.ADAPTER).is_file():
        raise OutpaceError(f"{name} contains updates of a model; save the merged model to share it")
    _, model, tokenizer = load_weights(name, chosen, trust_remote_code, **sharding(shared.ranks.size))
    target = Target(model, exact=False, pack=False)
    kind = str(model.dtype).removeprefix("torch.")
    return Loaded(_shown(name), target, tokenizer, kind, str(model.device), source), target


def sharding(size: int) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that shard a model over ranks by its own plan."""
    from transformers.distributed.configuration_utils import DistributedConfig

    if "tp_plan" in getattr(DistributedConfig, "__dataclass_fields__", {}):
        return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=size)}
    return {"tp_plan": "auto"}  # before DistributedConfig had a plan


def latency_of(target: ParallelTarget) -> Latency:
    """Measure what shared drafts cost here; all ranks call it together."""

    def share(nodes: int) -> int:
        return max(map(len, deal(typical(nodes), target.peers.size)))

    measured = target.measure()
    return Latency(measured.forwards, measured.telling, share)


def made(name: str, model: Any, tokenizer: Any, source: str = "") -> Loaded:
    """Wrap a transformers model that is in memory; the arguments are the fields of ``Loaded``."""
    dtype = str(model.dtype).removeprefix("torch.")
    return Loaded(name, Target(model), tokenizer, dtype, str(model.device), source)


def load_weights(
    name: str | None, dtype: torch.dtype | str, trust_remote_code: bool, **more: Any
) -> tuple[str, Any, Any]:
    """Load a transformers model, onto the CPU unless ``more`` places it elsewhere.

    Args:
        more: arguments of ``from_pretrained``: where the weights go instead.

    Returns:
        Its name for messages, the model, and its tokenizer.

    Raises:
        OutpaceError, UnsupportedModel: as ``load``.
    """
    _silence()
    return _shown(name), *_parts(name, dtype, trust_remote_code, **more)


def _parts(
    name: str | None, dtype: torch.dtype | str, trust_remote_code: bool, **more: Any
) -> tuple[Any, Any]:
    """Load a model and its tokenizer. Updates in a folder written by peft are merged into their model."""
    folder = None if name is None else Path(name).expanduser()
    if folder is None or not (folder / adapters.ADAPTER).is_file() or (folder / "config.json").is_file():
        return _read(source_of(name), _shown(name), dtype, trust_remote_code, **more)
    base = adapters.base_of(folder)
    try:
        model, tokenizer = _parts(base, dtype, trust_remote_code, **more)
    except OutpaceError as error:
        raise OutpaceError(
            f"{name} updates the model {base}: {error}. If that model has moved, set base_model_name_or_path "
            f"in {folder / adapters.ADAPTER} to its new place"
        ) from error
    return adapters.merge(model, folder), tokenizer


def _read(
    source: str, shown: str, dtype: torch.dtype | str, trust_remote_code: bool, **more: Any
) -> tuple[Any, Any]:
    try:
        _check_family(source, shown, trust_remote_code)
        model = _weights(source, shown, dtype, trust_remote_code, **more)
        return model, _tokenizer(source, shown, trust_remote_code)
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
    return _shown(name), _tokenizer(source, _shown(name), trust_remote_code)


def device_of(device: str | None) -> torch.device:
    """The device of a name; None is cuda if available.

    Raises:
        OutpaceError: the device cannot be used here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OutpaceError(f"device {device!r} cannot be used here: {first_line(error)}") from None
    return place


def dtype_of(dtype: str, device: torch.device) -> torch.dtype | str:
    """The dtype of a name. "auto" is float32 on a CPU, and stays "auto" on a GPU: the model's own.

    Raises:
        OutpaceError: there is no such dtype.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise OutpaceError(f"unknown dtype {dtype!r}; there are: auto, {', '.join(DTYPES)}")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def _silence() -> None:
    """Silence transformers' warnings and progress bars, but not the hub's download bars."""
    downloads = not are_progress_bars_disabled()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if downloads:
        enable_progress_bars()


def _shown(name: str | None) -> str:
    return nano_path().name if name is None else name


def source_of(name: str | None) -> str:
    """The path or hub name that transformers loads a model from: a path if the folder exists.

    Raises:
        OutpaceError: the name is neither.
    """
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
        if not any((path / file).is_file() for file in ("config.json", adapters.ADAPTER)):
            raise OutpaceError(f"{name} is not a model: the folder has no config.json")
        return str(path)
    if is_gguf(name):
        raise OutpaceError(
            f"{name} is a GGUF file, which llama.cpp decodes, and this needs a transformers model; give its "
            "folder or its name on the hub"
        )
    if path.exists():
        raise OutpaceError(f"{name} is a file; give the folder that contains config.json and the weights")
    if name == "smollm2":
        if not smollm2_path().is_dir():
            raise OutpaceError(
                "SmolLM2-135M-Instruct has not been fetched yet; run `make real` once, in a clone of outpace"
            )
        return str(smollm2_path())
    if _looks_like_path(name):
        raise OutpaceError(f"no such folder: {name}")
    return name


def _looks_like_path(name: str) -> bool:
    """True if a name cannot be a hub name, which is ``name`` or ``owner/name``."""
    separators = name.count("/") + name.count(os.sep) * (os.sep != "/")
    return name.startswith((".", "/", "~", os.sep)) or separators > 1 or name.endswith(("/", os.sep))


def _check_family(source: str, shown: str, trust_remote_code: bool) -> None:
    """Refuse a model that is not a decoder-only language model before its weights are read."""
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{shown} ({config.model_type}) is an encoder-decoder model; use it from Python: "
            "outpace.Engine(model, drafter).generate(prompts, sources=...)"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        raise UnsupportedModel(
            f"{shown} ({config.model_type}) is not a causal language model; outpace supports only those"
        )


def _weights(source: str, shown: str, dtype: torch.dtype | str, trust_remote_code: bool, **more: Any) -> Any:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
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


def _tokenizer(source: str, shown: str, trust_remote_code: bool) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        usable = bool(tokenizer("a b c").input_ids)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ImportError) as error:
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
        return (
            f"cannot load {shown}: there is no such folder, it is not in the local cache, and the Hugging "
            f"Face hub cannot be reached. Fetch it with a network (hf download {shown}), or give a folder"
        )
    if "safetensors" in text and isinstance(error, OSError):
        return (
            f"cannot load {shown}: it has no weights in safetensors format, the only one that outpace loads; "
            "convert them with model.save_pretrained(folder)"
        )
    where = "" if Path(source).is_dir() else " (no such folder, so it was looked up on the hub)"
    return f"cannot load {shown}{where}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" :") if lines else type(error).__name__

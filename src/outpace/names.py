"""Names that a user gives, of models, methods, dtypes and devices: checks that import no torch."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from pathlib import Path
from typing import Literal, get_args

from outpace import hub
from outpace.catalogue import Outline, entries, entry_of, outline, outlines
from outpace.core import DTYPES, OutpaceError, near, need
from outpace.embedded import nano_path, smollm2_path
from outpace.files import check_plain
from outpace.plugins import installed, why_absent
from outpace.spec import check as check_spec

ADAPTER = "adapter_config.json"  # as peft names it
SMOLLM2 = "smollm2"
COPYING = ("rewriting", "retrieval")
SUITES = ("builtin", *COPYING)
TRANSFORMERS = "transformers"  # the peer that needs no other package, and its methods
STOCK = ("plain", "prompt_lookup", "assisted")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
FILE = "file:"  # before the path of a suite's file
# Kinds of devices in torch's notation; a package may register another.
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "npu", "mlu", "musa", "xla", "mtia", "meta")
_HERE = Path(__file__).parent
Backend = Literal["auto", "native", "llamacpp"]
BACKENDS: tuple[str, ...] = get_args(Backend)  # what runs a GGUF file
GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def check_names(
    model: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    drafter: str = "",
    verifier: str = "match",
) -> None:
    """Refuse unknown names.

    What these checks cannot know, such as bounds of options, is checked where the objects are made.

    Args:
        device: in torch's notation; None is any.
        drafter: a spec string; empty for the default.

    Raises:
        OutpaceError: a name is unknown; the message names the remedy, and a similar name if there is one.
    """
    # Where the classes are imported, loading them finds the same mistakes at once.
    if drafter and "outpace.drafters" not in sys.modules:
        _check_places(check_spec("drafter", outlines("drafter"), drafter, partial(_foreign, "drafter")))
    if "outpace.verify" not in sys.modules:
        check_spec("verifier", outlines("verifier"), verifier, partial(_foreign, "verifier"))
    check_dtype(dtype)
    if device is not None:
        check_device(device)
    check_model(model)


def methods(kind: str) -> list[str]:
    """The names of all drafters or verifiers, those of other packages too."""
    return sorted({*entries(kind), *installed(f"{kind}s")})


def check_observer(spec: str) -> None:
    check_spec("observer", {}, spec, partial(_foreign, "observer"))


def _foreign(kind: str, point: EntryPoint) -> type[Outline] | None:
    """The outline of another package's class; None if its package has no table."""
    entry = entry_of(kind, point)
    return None if entry is None else outline(entry)


def _check_places(drafter: Outline | None) -> None:
    """Refuse a draft model, or the folder of a trained drafter, that is neither here nor on the hub."""
    if drafter is None:
        return
    for option, value in vars(drafter).items():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Outline):
                _check_places(one)
        if option == "model" and isinstance(value, str):
            check_model(value)
        if option == "path" and isinstance(value, str):
            if "Path" not in drafter.types[option]:
                hub.check_drafter(value, drafter.called)
            elif not Path(value).exists():  # a file that only its drafter knows
                raise OutpaceError(f"no such file: {value}")


def check_dtype(dtype: str) -> None:
    if dtype not in (known := ("auto", *DTYPES)):
        raise OutpaceError(f"unknown dtype {dtype!r}; there are: {', '.join(known)}.{near(dtype, known)}")


def check_device(device: str) -> None:
    """Refuse a device that is a misspelling; one that torch alone may know is left to torch."""
    kind = device.partition(":")[0]
    if kind not in _DEVICES and (hint := near(kind, _DEVICES)):
        raise OutpaceError(f"unknown device {device!r}.{hint}")
    if kind == "cuda" and _version("torch").endswith("+cpu"):
        raise OutpaceError(
            f"device {device!r} cannot be used here: torch {_version('torch')} is built for CPUs alone; "
            "install a build for GPUs"
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def check_suite(name: str) -> None:
    others = installed("suites")
    if name.startswith(FILE):
        path = Path(name.removeprefix(FILE)).expanduser()
        check_plain(path)
        if not path.exists():
            raise OutpaceError(f"no such file: {path}; --suite {FILE}PATH takes a JSONL file of prompts")
        return
    if name not in (*SUITES, *others):
        known = (*SUITES, *others, f"{FILE}PATH")
        message = f"there is no suite {name!r}.{near(name, known)} There are: {', '.join(known)}"
        raise OutpaceError(why_absent("suite", name) or message)


def check_peers(text: str) -> None:
    """Refuse unknown libraries in a list of peers, as in ``transformers:plain,vllm=VENV``.

    Of the methods, those of transformers are known here.
    """
    known = (TRANSFORMERS, *installed("peers"))
    for piece in text.split(","):
        name = piece.strip().partition("=")[0]
        library, _, kind = name.partition(":")
        if name in ("", "none"):
            continue
        if library not in known:
            message = f"there is no peer {library!r}.{near(library, known)} There are: {', '.join(known)}"
            raise OutpaceError(why_absent("peer", library) or message)
        if kind and library == TRANSFORMERS:
            check_method(library, kind, STOCK)


def check_method(library: str, kind: str, known: Collection[str]) -> None:
    if kind not in known:
        message = f"{library} has no method {kind!r}.{near(kind, known)} It has: {', '.join(known)}"
        raise OutpaceError(message)


def read_device_map(text: str) -> str | dict[str, int | str]:
    """A device map: a name, or devices by module from JSON.

    Raises:
        OutpaceError: it is neither, or accelerate is missing.
    """
    need("devices", "a device map")
    if text in DEVICE_MAPS:
        return text
    try:
        layers = json.loads(text)
    except ValueError:
        layers = None
    if not isinstance(layers, dict) or not layers:
        raise OutpaceError(
            f"a device map must be {', '.join(DEVICE_MAPS)}, or JSON from module to device, as in "
            f'\'{{"model.layers.0": 0, "": "cpu"}}\'; not {text!r}.{near(text, DEVICE_MAPS)}'.rstrip(".")
        )
    if "disk" in layers.values():
        raise OutpaceError("weights on disk would be read in every step; put those modules on cpu")
    return layers


def check_llamacpp(model: str | None, options: str) -> None:
    """Refuse options of llama.cpp for a model that it does not run."""
    if options and not is_gguf(model or ""):
        raise OutpaceError(f"--llamacpp is for .gguf files, and {shown_name(model)} is not one; leave it out")


def check_backend(model: str | None, backend: str, llamacpp: str) -> None:
    """Refuse an unknown backend, one for a model that is no GGUF file, or one at odds with its options."""
    if backend not in BACKENDS:
        raise OutpaceError(f"--backend must be {', '.join(BACKENDS)}, not {backend!r}")
    if backend != "auto" and not is_gguf(model or ""):
        raise OutpaceError(f"--backend is for .gguf files, and {shown_name(model)} is not one; leave it out")
    if backend == "native" and llamacpp:
        raise OutpaceError("--llamacpp has options of llama.cpp; leave it or --backend native out")


def by_llamacpp(model: str | None, backend: str, llamacpp: str) -> bool:
    """True if llama.cpp is asked to run a model."""
    return is_gguf(model or "") and (backend == "llamacpp" or bool(llamacpp))


def check_model(name: str | None) -> None:
    if name is None:
        source_of(name)
    elif hub.is_quantised(name):
        hub.check_quantised(name)
    elif not is_gguf(name):
        source = source_of(name)
        if not Path(source).is_dir():
            hub.check(source, (SMOLLM2,))
    else:
        check_plain(path := Path(name).expanduser())
        if not path.exists():
            raise OutpaceError(f"no such file: {name}")


def is_gguf(name: str | Path) -> bool:
    """True if a model's name is a GGUF file: its path, or ``owner/name:QUANT``."""
    return str(name).lower().endswith(".gguf") or hub.is_quantised(str(name))


def is_model(folder: Path) -> bool:
    """True if a folder is a transformers model, or low-rank updates of one."""
    return any((folder / file).is_file() for file in ("config.json", ADAPTER))


def means_a_model(word: str) -> bool:
    """True for a word that can only be meant as a model: a known name, a GGUF file or a model's folder."""
    if word == SMOLLM2 or is_gguf(word):
        return True
    try:
        return is_model(Path(word))
    except OSError:  # a text that is too long for a path
        return False


def models_in(folder: Path) -> dict[str, str]:
    """The models in a folder, by the names of their folders and files, in order; empty if it has none."""
    found = dict[str, str]()
    if is_model(folder):
        return found
    for path in sorted(folder.iterdir()):
        if is_model(path):
            found[path.name] = str(path)
        elif path.is_dir():
            inner = _heads(sorted(path.glob("*.gguf")))
            found |= {(path.name if len(inner) == 1 else one.name): str(one) for one in inner}
        else:
            found |= {one.name: str(one) for one in _heads([path])}
    return found


def _heads(paths: list[Path]) -> list[Path]:
    """The GGUF files that are models: no projectors, and of several parts the first."""
    names = [path for path in paths if path.suffix.lower() == ".gguf" and "mmproj" not in path.name.lower()]
    return [path for path in names if (part := GGUF_PART.search(path.name)) is None or int(part[1]) == 1]


def shown_name(name: str | None) -> str:
    return nano_path().name if name is None else name


def source_of(name: str | None) -> str:
    """The path or hub name that transformers loads a model from: a path if the folder exists.

    A path in the hub's cache if the hub does not answer.

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
        if not is_model(path):
            raise OutpaceError(f"{name} is not a model: the folder has no config.json")
        return str(path)
    if is_gguf(name):
        raise OutpaceError(
            f"{name} is a GGUF file, which llama.cpp decodes, and this needs a transformers model; give its "
            "folder or its name on the hub"
        )
    if path.exists():
        check_plain(path)
        raise OutpaceError(f"{name} is a file; give the folder that contains config.json and the weights")
    if name == SMOLLM2:
        if not smollm2_path().is_dir():
            raise OutpaceError(
                "SmolLM2-135M-Instruct has not been fetched yet; run `outpace pull smollm2` once"
            )
        return str(smollm2_path())
    if _looks_like_path(name):
        hint = near(path.name, [one.name for one in _siblings(path)])
        raise OutpaceError(f"no such folder: {name}{'.' if hint else ''}{hint}")
    return hub.source(name)


def _siblings(path: Path) -> list[Path]:
    try:
        return [one for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        return []


def _looks_like_path(name: str) -> bool:
    """True if a name cannot be a hub name, which is ``name`` or ``owner/name``."""
    separators = name.count("/") + name.count(os.sep) * (os.sep != "/")
    path = name.startswith((".", "/", "~", os.sep)) or separators > 1 or name.endswith(("/", os.sep))
    return path or not re.fullmatch(r"[\w./-]+", name)

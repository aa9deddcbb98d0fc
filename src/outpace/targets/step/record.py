"""Answers of a target's self-test, kept in the user's cache: a loaded model that passed is not tested again.

An answer is known by all that it may depend on. For a transformers model that is its classes, their source
and the functions that they have in this process (some packages replace them in place), its config, its
weights (of each tensor the shape, the dtype and up to ``_SAMPLE`` numbers spread over it), the target's
options and kernels, this package's source, the versions of torch and transformers, the processor, its
instruction sets, threads, and torch's settings of precision; ``llamacpp/findings.py`` says what it is for a
GGUF file. Sampled numbers do: which operations round how depends on shapes and kernels, not on single
weights.

A file is read only if nobody but this user can have written it and the whole of what the answer depends on is
in it, word for word; else the model is tested. Without a folder that can be written, or in one that others
may write to, there is no record.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outpace._version import __version__
from outpace.core import OutpaceError, first_line
from outpace.embedded import CACHE, NoHome, cache_path
from outpace.files import replacing, sealed, unsealed, why_foreign
from outpace.native.instructions import instructions
from outpace.native.systems import SYSTEMS
from outpace.targets.hardware import hardware
from outpace.targets.inputs.attributes import PLAIN, attributes
from outpace.targets.inputs.changes import hooks_of
from outpace.targets.inputs.mapped import FileMemory

Ask = Callable[[], str | None]

_log = logging.getLogger(__name__)

TESTED = "OUTPACE_TESTED"
_SAMPLE = 256  # numbers of a weight
_MOST = 512  # files
# Settings of the libraries below; the folder of the cache and of this record change no answer.
_SETTINGS = (
    "OUTPACE_", "ATEN_", "CUBLAS_", "DNNL_", "GGML_", "KMP_", "LLAMA_", "MKL_", "OMP_", "ONEDNN_", "TORCH_",
)  # fmt: skip
_APART = (CACHE, TESTED)


def folder() -> Path | None:
    """The folder of the record: ``$OUTPACE_TESTED`` or ``tested`` in the cache; None if that is empty.

    None too, with a warning, if others may write to it.
    """
    named = os.environ.get(TESTED)
    if named == "":
        return None
    try:
        found = Path(named) if named else cache_path() / "tested"
        if not (why := why_foreign(found.stat())):
            return found
        why = f"{found} is not read, since {why}; make it yours alone (chmod 700), or set {TESTED}"
    except FileNotFoundError:
        return found
    except (OSError, NoHome) as error:
        why = first_line(error)
    _warn(f"models are tested each time they are loaded, since there is no record: {why}")
    return None


@lru_cache(maxsize=8)
def _warn(message: str) -> None:
    """Warn once."""
    _log.warning(message)


class Record:
    """The record of one model and the options of its target.

    Args:
        about: returns all that the answers depend on, as digests and words; None if that is not known. It is
            called only if there is a folder.
    """

    def __init__(self, about: Callable[[], Mapping[str, str] | None]) -> None:
        self._folder = folder()
        self._about = None if self._folder is None else about()

    @classmethod
    def of_model(cls, model: Any, options: Mapping[str, Any]) -> Record:
        """The record of a loaded transformers model and the options of its target."""
        return cls(lambda: _about(model, options))

    def answer(self, question: str, step: Any, ask: Ask) -> str | None:
        """The recorded answer to a question about the modules that steps run on, otherwise ``ask()``.

        An answer is the reason of a failure; None if there was none, which the file has as an empty text.
        """
        key = {"question": question, "step": digest(_layout(step))}
        if (found := self.find(**key)) is None:
            self.keep(found := ask() or "", **key)
        return found or None

    def find(self, **key: str) -> str | None:
        """The recorded answer to a question; None if there is none."""
        place = self._place(key)
        return None if place is None else _read(*place)

    def keep(self, answer: str, **key: str) -> None:
        """Record the answer to a question."""
        if (place := self._place(key)) is not None:
            _write(place[0], {"key": place[1], "answer": answer})

    def _place(self, key: Mapping[str, str]) -> tuple[Path, dict[str, str]] | None:
        """The file of an answer, and all that the answer depends on."""
        if self._folder is None or self._about is None:
            return None
        whole = {**self._about, **key}
        return self._folder / f"{digest(sorted(whole.items()))}.json", whole


def answer(record: Record | None, question: str, step: Any, ask: Ask) -> str | None:
    """``Record.answer``; without a record, ``ask()``."""
    return ask() if record is None else record.answer(question, step, ask)


def _read(path: Path, key: Mapping[str, str]) -> str | None:
    try:
        with path.open(encoding="utf-8") as file:
            if why_foreign(os.fstat(file.fileno())):
                return None
            found = unsealed(path, json.load(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        why = first_line(error)
        _warn(f"the record of a self-test is left out: {why if str(path) in why else f'{path}: {why}'}")
        return None
    if not isinstance(found, dict) or found.get("key") != key or not isinstance(found.get("answer"), str):
        return None
    answer: str = found["answer"]
    return answer


def _write(path: Path, entry: Mapping[str, Any]) -> None:
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with replacing(path, 0o600) as part:
            part.write_text(json.dumps(sealed(entry), indent=1), encoding="utf-8")
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST]:
            file.unlink()
    except (OSError, OutpaceError) as error:
        _log.debug("the self-test is not recorded: %s", error)


def _about(model: Any, options: Mapping[str, Any]) -> dict[str, str] | None:
    """All that an answer depends on, as digests and words; None if that is not known."""
    modules = list(model.modules())
    if any("forward" in vars(item) or hooks_of(item) for item in modules):
        return None
    classes = {type(module) for module in modules}
    sources = [_source(sys.modules.get(kind.__module__)) for kind in classes]
    weights = _weights(model)
    if weights is None or None in sources:
        return None
    config = model.config.get_text_config(decoder=True)
    values = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    numbers = [
        (name, sorted((key, _shown(value)) for key, value in attributes(module).items()))
        for name, module in model.named_modules()
    ]
    devices = {weight.device for weight in model.parameters()}
    return {
        **here(devices),
        "classes": digest([*sorted(map(_name, classes)), *sorted(map(str, sources))]),
        "functions": digest(_functions(classes, config._attn_implementation)),
        "config": digest(
            [repr(sorted(values.items(), key=lambda item: item[0])), config._attn_implementation, numbers]
        ),
        "weights": weights,
        "options": repr(sorted(options.items())),
        "transformers": transformers.__version__,
    }


def here(devices: Iterable[torch.device]) -> dict[str, str]:
    """What every answer depends on, as digests and words: this package, torch, the machine, its settings.

    Args:
        devices: those of the model.
    """
    names = sorted(map(str, devices := set(devices)))
    return {
        "outpace": f"{__version__} {_own_source()}",
        "torch": torch.__version__,
        "machine": ", ".join([platform.machine(), *hardware(devices), _instructions(), *names]),
        "settings": digest([sorted(_settings()), _precisions()]),
    }


def _weights(model: Any) -> str | None:
    """A digest of weights and buffers; None if some cannot be read."""
    found, files = hashlib.sha256(), FileMemory()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if type(weight) not in (Tensor, torch.nn.Parameter) or weight.is_meta:
            return None
        flat = weight.detach().reshape(-1) if weight.is_contiguous() else weight.detach().flatten()
        sample = flat[:: max(len(flat) // _SAMPLE, 1)].contiguous().cpu()
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype} {weight.device}".encode())
        found.update(sample.view(torch.uint8).numpy().tobytes() if len(sample) else b"")
        files.drop([weight])
    return found.hexdigest()


def _shown(value: Any) -> str:
    """An attribute of a module as text that is the same in every process: functions by their code."""
    if isinstance(value, dict):
        return repr([(key, _shown(one)) for key, one in value.items()])
    if isinstance(value, set | frozenset):
        return repr(sorted(map(_shown, value)))
    if isinstance(value, list | tuple):
        return repr(list(map(_shown, value)))
    return repr(value) if isinstance(value, PLAIN) else repr(list(_codes(value)))


def _layout(step: Any) -> list[str]:
    """The classes of a step's modules, with the kernels of its linear layers."""
    return [
        f"{name} {type(module).__qualname__} {getattr(getattr(module, 'kernel', None), 'name', '')}"
        for name, module in step.named_modules()
    ]


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _functions(classes: Iterable[type], attention: str) -> list[str]:
    """The functions of classes, of the Python modules with these, and of attention, by their code."""
    owners = {owner for kind in classes for owner in kind.__mro__ if owner is not object}
    modules = {owner.__module__ for owner in owners}
    spaces: dict[str, Mapping[str, Any]] = {_name(owner): vars(owner) for owner in owners}
    spaces |= {module: vars(sys.modules[module]) for module in modules if module in sys.modules}
    found = [
        f"{place} {name} {code}"
        for place, space in spaces.items()
        for name, value in list(space.items())
        for code in _codes(value)
    ]
    return sorted([*found, *_codes(ALL_ATTENTION_FUNCTIONS.get(attention))])


def _codes(value: Any) -> Iterator[str]:
    """The code of a function, and of those that it wraps; the name of a class; the class of a callable."""
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    while isinstance(value, FunctionType):
        code = value.__code__
        yield f"{code.co_filename}:{code.co_firstlineno} {digest(code.co_code)}"
        value = vars(value).get("__wrapped__")
    if callable(value):
        yield _name(value if isinstance(value, type) else type(value))


def _source(module: Any) -> str | None:
    """A digest of a Python module's file; None without one."""
    file = Path(getattr(module, "__file__", None) or "")
    return _file(file, file.stat().st_mtime_ns) if file.is_file() else None


@lru_cache(maxsize=64)
def _file(path: Path, modified: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def _own_source() -> str:
    """A digest of this package's source: a version under development keeps its number."""
    root = Path(__file__).parents[2]
    endings = (".py", ".c", ".h", *(system.ending for system in SYSTEMS.values()))
    parts = sorted(file for ending in endings for file in root.rglob(f"*{ending}"))
    return digest([(str(file.relative_to(root)), file.read_bytes()) for file in parts])[:16]


def _instructions() -> str:
    """The processor's instruction sets: those that torch uses, and a digest of those that it has."""
    return f"{torch.backends.cpu.get_cpu_capability()} {digest(sorted(instructions()))[:16]}"


def _settings() -> Iterable[tuple[str, str]]:
    return [
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_SETTINGS) and name not in _APART
    ]


def _precisions() -> str:
    """torch's settings of precision, old and new."""
    backends = torch.backends
    found: list[Any] = [backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()]
    for owner in (
        backends,
        backends.mkldnn,
        getattr(backends.mkldnn, "matmul", None),
        backends.cuda.matmul,
        backends.cudnn,
    ):
        found.append(getattr(owner, "fp32_precision", None))
    return repr(found)


def digest(value: Any) -> str:
    """A digest of a value's ``repr``."""
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()

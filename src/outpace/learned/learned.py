"""Base class of trained modules, which are made for a target and bound to it.

Authors of learned drafters import everything from here: the target's head (``head.py``) and folders on disk
(``folder.py``). Here is what loading and drafting need; how a module learns is outpace-lab's ``train``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from abc import ABC
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from typing_extensions import Self

from outpace.core import OutpaceError, first_line, out_of_memory
from outpace.learned.folder import CONFIG, FORMAT, WEIGHTS, read_config, read_weights, write_folder
from outpace.learned.head import PartialHead, head_weights
from outpace.learned.hidden_layers import check_layers
from outpace.targets.base import TargetModel
from outpace.targets.cpu.linear import pack_drafter

L = TypeVar("L", bound="Learned")

__all__ = [
    "CONFIG",
    "WEIGHTS",
    "Fit",
    "Learned",
    "PartialHead",
    "head_weights",
    "read_config",
]


@dataclass(frozen=True)
class Fit:
    """The target that a module was made for. It also fits other targets of the same sizes, untrained."""

    vocabulary: int
    hidden_size: int
    name: str

    @classmethod
    def of(cls, target: TargetModel) -> Fit:
        return cls(target.vocabulary, target.hidden.size, target.name)


class Learned(nn.Module, ABC):
    """The trained part of a drafter.

    Embeddings and head that it shares with the target are not saved; once the module is bound, it uses
    ``target.embed`` and ``target.head``. Hidden states are passed to it, each row once: if drafters selected
    them from the rows of a step, each would repeat the walk along its path.

    Class attributes:
        method: the drafter's name.
        config_type: a frozen dataclass of plain values and tuples of them, the options of training from
            scratch.
        fitted: names of the target's sizes that it depends on.

    Args:
        config: of ``config_type``.
        fit: the target's sizes.
    """

    method: ClassVar[str]
    config_type: ClassVar[type[Any]]
    fitted: ClassVar[tuple[str, ...]] = ("vocabulary", "hidden_size")

    def __init__(self, config: Any, fit: Fit) -> None:
        super().__init__()
        self.config = config
        self.fit = fit
        self._target: TargetModel | None = None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers that it reads, numbered as in ``Output.hidden``."""
        return (-1,)

    # -- with a target -----------------------------------------------------------------------------------

    @classmethod
    def new(cls: type[L], config: Any, target: TargetModel) -> L:
        """An untrained module for a target, in float32, on its device."""
        made = cls(config, Fit.of(target)).to(target.hidden.device)
        made.bind(target)
        return made

    def bind(self, target: TargetModel) -> None:
        """Bind the module to the target whose embeddings and head it shares.

        Raises:
            OutpaceError: the target does not fit, or the module is bound to another one.
        """
        self.check(target)
        if self._target not in (None, target):
            raise OutpaceError(f"{self.method}: this module is bound to another target; load one per target")
        self._target = target

    def check(self, target: TargetModel) -> None:
        """Check that it fits a target.

        Raises:
            OutpaceError: the target has other sizes, or fewer layers than it reads.
        """
        found = Fit.of(target)
        for what in self.fitted:
            if getattr(found, what) != getattr(self.fit, what):
                raise OutpaceError(
                    f"{self.method}: it was made for {self.fit.name} with a {what.replace('_', ' ')} of "
                    f"{getattr(self.fit, what)}, but this target, {found.name}, has {getattr(found, what)}; "
                    f"train one for it: outpace train {self.method} --model {found.name}"
                )
        check_layers(self.method, self.hidden_layers, target)

    @property
    def target(self) -> TargetModel:
        if self._target is None:
            raise OutpaceError(f"{self.method}: no target yet; call bind(target)")
        return self._target

    @classmethod
    def of(cls: type[L], given: Any, target: TargetModel, pack: bool = True) -> L:
        """The given module, bound to the target, or the one in the given folder.

        Args:
            pack: pack a folder's weights for drafting on a CPU (``pack_drafter``), after which they cannot be
                trained.
        """
        if isinstance(given, cls):
            given.bind(target)
            return given
        module = cls.load(given, target)
        if pack and target.hidden.device.type == "cpu":
            pack_drafter(module)
        return module

    # -- on disk -----------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``; create the folder if needed."""
        described = {
            "method": self.method,
            "format": FORMAT,
            "target": dataclasses.asdict(self.fit),
            "config": dataclasses.asdict(self.config),
        }
        write_folder(folder, described, self.saved())

    def saved(self) -> dict[str, Tensor]:
        """The tensors of its folder, by name."""
        return self.state_dict()

    @classmethod
    def load(cls: type[L], folder: str | Path, target: TargetModel) -> L:
        """Load a module for drafting from a folder that ``save`` wrote, in the target's dtype and device.

        Raises:
            OutpaceError: there is none, it is of another method or for a target of other sizes, or a tensor
                is missing, superfluous or of the wrong shape; the message names it.
        """
        described = read_config(folder, cls.method)
        with _explained(folder, cls.method):
            config, fit = cls._config(described), Fit(**described["target"])
        tensors = read_weights(folder)
        return cls.sketched(config, fit, target, tensors, str(folder)).drafting(target, tensors, str(folder))

    @classmethod
    def sketched(
        cls,
        config: Any,
        fit: Fit,
        target: TargetModel,
        tensors: Mapping[str, Tensor],
        where: str,
        given: Seq[str] = (),
    ) -> Self:
        """A module for the weights in a folder, made once a sketch without memory fits them and the target.

        Args:
            where: the folder, for messages.
            given: names of buffers that a new module has already, and the folder lacks.

        Raises:
            OutpaceError: as ``check`` and ``compare``, or the config is broken.
        """
        with _explained(where, cls.method):
            with torch.device("meta"), _at_most(len(tensors) + len(given), f"{where}: {CONFIG}"):
                sketch = cls(config, fit)
            sketch.check(target)
            own = sketch.state_dict()
            sketch.compare({**tensors, **{name: own[name] for name in given}}, where)
            return cls(config, fit)

    def drafting(self, target: TargetModel, tensors: Mapping[str, Tensor], where: str) -> Self:
        """Bind the module to its target, take weights, and freeze it, in the target's dtype and device.

        Raises:
            OutpaceError: as ``bind`` and ``take``.
        """
        self.bind(target)
        self.take(tensors, where)
        self.requires_grad_(False).eval()
        return self.to(device=target.hidden.device, dtype=target.hidden.dtype)

    @classmethod
    def config_of(cls, given: Any) -> Any:
        """The config, of ``config_type``, of a module or of the one in a folder.

        Raises:
            OutpaceError: there is none in the folder, or it is of another method.
        """
        if isinstance(given, cls):
            return given.config
        with _explained(given, cls.method):
            return cls._config(read_config(given, cls.method))

    @classmethod
    def _config(cls, described: Mapping[str, Any]) -> Any:
        made = cls.config_type(**{name: _frozen(value) for name, value in described["config"].items()})
        for name, hint in get_type_hints(cls.config_type).items():
            kinds = {kind for wanted in get_args(hint) or (hint,) for kind in _NUMBERS.get(wanted, (None,))}
            value = getattr(made, name, None)
            if None not in kinds and (type(value) not in kinds or value in _ENDLESS or value != value):
                raise TypeError(f"{name} is {value!r}")
        return made

    def take(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Copy weights into the module.

        Raises:
            OutpaceError: as ``compare``.
        """
        self.compare(tensors, where)
        self.load_state_dict(dict(tensors))

    def compare(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Compare tensors with the module's own.

        Raises:
            OutpaceError: a tensor is missing, superfluous, of the wrong shape, or of integers in place of
                floats; the message names it.
        """
        place = f"{where} ({self.method} for {self.fit.name})"
        own = self.state_dict()
        for name, tensor in own.items():
            if name not in tensors:
                raise OutpaceError(f"{place}: there is no tensor {name!r}, of shape {list(tensor.shape)}")
            if tensors[name].shape != tensor.shape:
                raise OutpaceError(
                    f"{place}: tensor {name!r} has shape {list(tensors[name].shape)}, but by {CONFIG} it "
                    f"should have {list(tensor.shape)}"
                )
            if _kind(tensors[name]) != _kind(tensor):
                raise OutpaceError(
                    f"{place}: tensor {name!r} is of {tensors[name].dtype}, in place of {_kind(tensor)}"
                )
        left = sorted(tensors.keys() - own.keys())
        if left:
            shape = list(tensors[left[0]].shape)
            raise OutpaceError(f"{place}: tensor {left[0]!r}, of shape {shape}, is not expected by {CONFIG}")


@contextlib.contextmanager
def _explained(folder: str | Path, method: str) -> Iterator[None]:
    """Explain errors that wrong entries of a config.json raise; they may be of any kind."""
    try:
        yield
    except OutpaceError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise OutpaceError(f"{folder}: {CONFIG} is not one of {method}: {first_line(error)}") from error


# Types of a JSON value for a field, by the field's; other fields are checked where they are used.
_NUMBERS: Mapping[Any, tuple[type, ...]] = {
    int: (int,), float: (int, float), bool: (bool,), type(None): (type(None),)
}  # fmt: skip
_ENDLESS = (float("inf"), float("-inf"))
_MORE = 1024  # weights that cost nothing to make without memory; comparing then names the first


@contextlib.contextmanager
def _at_most(count: int, what: str) -> Iterator[None]:
    """Refuse modules with far more weights than there are, before the next is made, in this thread."""
    left, thread = count + _MORE, threading.get_ident()

    def registered(module: nn.Module, name: str, weight: nn.Parameter) -> None:
        nonlocal left
        if threading.get_ident() != thread:
            return
        left -= 1
        if left < 0:
            raise OutpaceError(f"{what} describes a larger module: there are only {count} tensors")

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _kind(tensor: Tensor) -> str:
    """The kind of a tensor's numbers."""
    if tensor.dtype in _FLOATS:
        return "floats"
    return "integers" if tensor.dtype in _WHOLE else str(tensor.dtype)


def _frozen(value: Any) -> Any:
    """Convert JSON's lists back to tuples."""
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value

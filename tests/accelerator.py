"""An emulated accelerator: tensors that say cuda or mps, hold data of the CPU, and are counted.

Within ``Accelerator("cuda")`` a model moves to ``cuda:0`` and runs there as on a GPU, computed by the CPU.
What a GPU refuses is refused: operations on tensors of two devices, float64 on mps, host reads and uploads
while a graph is captured, an upload on mps that reads memory after its tensor is gone. What costs time
there is counted by the line of ours that asked for it: launches of kernels, host reads (the host waits for
the device), and copies from the host, which may block. A graph is a record of operations, which is played
again.

What it does not show: times, rounding of another device's kernels, and races between streams.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
_OURS = (str(ROOT / "src"), str(ROOT / "lab" / "src"))
_KINDS = ("cuda", "mps")

# Operations that launch no kernel, besides views, which are found by schema.
_FREE = {
    f"aten::{name}"
    for name in [
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "detach",
        "is_same_size",
        "lift_fresh",
        "alias",
        "_unsafe_view",
        "_reshape_alias",
        "is_pinned",
        "equal",
        "_local_scalar_dense",
    ]
}
# Operations whose result has a size that the host must know, so that it waits.
_READS = {
    f"aten::{name}"
    for name in [
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
    ]
}
_INDEXING = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
_WIDE = (torch.float64, torch.complex128)


@dataclass
class Counts:
    """What was counted, by the line that asked for it: launches outside graphs, replays, reads, uploads.

    Attributes:
        launches: kernels outside graphs.
        replays: graphs that were replayed.
        reads: times that the host waited for the device.
        copies: uploads.
        blocking: those of them that wait for the device.
    """

    launches: Counter[Place] = field(default_factory=Counter)
    replays: Counter[Place] = field(default_factory=Counter)
    reads: Counter[Place] = field(default_factory=Counter)
    copies: Counter[Place] = field(default_factory=Counter)
    blocking: Counter[Place] = field(default_factory=Counter)

    def clear(self) -> None:
        for counter in vars(self).values():
            counter.clear()

    def per(self, steps: int) -> dict[str, float]:
        """Each count divided by a number of steps."""
        return {name: counter.total() / steps for name, counter in vars(self).items()}

    def lines(self, name: str, steps: int, most: int = 8) -> str:
        """The lines that most of a count comes from, for a message."""
        counter: Counter[Place] = getattr(self, name)
        return "\n".join(
            f"  {count / steps:6.2f} {_named(place)}" for place, count in counter.most_common(most)
        )


class Refused(RuntimeError):
    """What a real device would refuse."""


# A place in the code: its file, line and function.
Place = tuple[str, int, str]


def _place() -> Place:
    """The innermost line of outpace's that runs, or, if there is none, of a test's."""
    frame: Any = sys._getframe(2)
    other = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            return code.co_filename, frame.f_lineno, code.co_name
        if other is None and "/torch/" not in code.co_filename and code.co_filename != __file__:
            other = code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return other or ("?", 0, "?")


def _named(place: Place) -> str:
    return f"{place[0].removeprefix(str(ROOT)).lstrip('/')}:{place[1]} {place[2]}"


def line_of_ours() -> str:
    """The innermost line of outpace's that runs, as file:line name."""
    return _named(_place())


def _leaves(values: Any) -> Iterator[Any]:
    """What is in nested tuples, lists and dictionaries; torch's own walk takes most of a test's time."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, tuple | list | dict):
            yield from _leaves(value)
        else:
            yield value


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _map(change, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_map(change, part) for part in value])
    return change(value)


class Placed(Tensor):
    """A tensor that says it is on a device, and holds its data on the CPU.

    Methods that torch binds by hand want to switch to the device, which a build for the CPU cannot, so
    they are overridden.
    """

    inner: Tensor
    on: Accelerator
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device, on: Accelerator) -> Placed:
        with torch.inference_mode(inner.is_inference()):  # a view of a weight is none of inference mode
            return torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=device,
            )

    def __init__(self, inner: Tensor, device: torch.device, on: Accelerator) -> None:
        self.inner, self.on = inner, on
        if device.type == "mps" and inner.dtype in _WIDE:
            raise TypeError(f"mps has no {inner.dtype}, at {line_of_ours()}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: Any) -> Placed:
        return Placed(self.inner.clone(), self.device, self.on)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def get_device(self) -> int:
        return self.device.index

    def __getitem__(self, index: Any) -> Placed:
        with self.on.indexing(self, index):
            return Placed(self.inner[_map(_inner, index)], self.device, self.on)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, Tensor) and not isinstance(value, Placed) and value.dim():
            self.on.upload(f"a value of {tuple(value.shape)}", waits=True)
        with self.on.indexing(self, index, value):
            self.inner[_map(_inner, index)] = _inner(value)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Placed:
        self.on.run(torch.ops.aten.copy_.default, (self, other, non_blocking), {})
        return self

    def contiguous(self, **options: Any) -> Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        self.on.read("nonzero")
        found = self.inner.nonzero(as_tuple=as_tuple)
        return _map(lambda one: Placed(one, self.device, self.on), found)

    def __invert__(self) -> Tensor:
        return self.bitwise_not()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def item(self) -> Any:
        self.on.read("item")
        return self.inner.item()

    def tolist(self) -> Any:
        self.on.read("tolist")
        return self.inner.tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        self.on.read("index")
        return self.inner.__index__()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise Refused(f"a tensor on {self.device} is no array, at {line_of_ours()}")

    numpy = __array__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Refused(f"{func} on a tensor of an accelerator that is gone")


class _Launches(TorchDispatchMode):
    """Counts operations on the data of a tensor that is on the accelerator."""

    def __init__(self, on: Accelerator) -> None:
        super().__init__()
        self._on = on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _launches(func):
            self._on.launch(lambda: _repeat(func, args, kwargs, out))
        return out


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Placed) else value


class _Mode(TorchDispatchMode):
    """Runs each operation that concerns the accelerator on the CPU, with its rules."""

    def __init__(self, on: Accelerator) -> None:
        super().__init__()
        self._on = on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _leaves((args, kwargs))
        if not any(
            isinstance(leaf, Placed) or (isinstance(leaf, torch.device) and leaf.type in _KINDS)
            for leaf in leaves
        ):
            return func(*args, **kwargs)
        if _is_composite(func):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return self._on.run(func, args, kwargs)


_COMPOSITE: dict[Any, bool] = {}
_VIEWS: dict[Any, bool] = {}


def _is_composite(func: Any) -> bool:
    """True for operations made of others, which arrive whole in inference mode."""
    if func not in _COMPOSITE:
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        kept = func._schema.name in ("aten::_to_copy", "aten::scaled_dot_product_attention")
        _COMPOSITE[func] = not kept and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return _COMPOSITE[func]


def _is_view(func: Any) -> bool:
    if func not in _VIEWS:
        aliased = any(argument.alias_info is not None for argument in func._schema.arguments)
        _VIEWS[func] = aliased and not func._schema.is_mutable
    return _VIEWS[func]


def _launches(func: Any) -> bool:
    return not _is_view(func) and func._schema.name not in _FREE


class Accelerator:
    """Context in which torch has devices of a kind that are emulated.

    Args:
        kind: "cuda" or "mps".
        devices: their number.

    Attributes:
        counts: what was counted since they were last cleared.
    """

    def __init__(self, kind: str, devices: int = 1) -> None:
        self.kind, self.devices = kind, devices
        self.counts = Counts()
        self._capturing: list[Callable[[], None]] | None = None
        self._muted = False
        self._stack = ExitStack()

    def __enter__(self) -> Accelerator:
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        self._stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(
            True
        )  # or a moved weight forgets its class
        for patch in _patches(self):
            self._stack.enter_context(patch)
        self._stack.enter_context(_Mode(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Context in which nothing is counted."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    # -- what happens ------------------------------------------------------------------------------------

    def read(self, what: str) -> None:
        """The host waits for the device."""
        if self._capturing is not None:
            raise Refused(f"host read while a graph is captured: {what}, at {line_of_ours()}")
        if not self._muted:
            self.counts.reads[_place()] += 1

    def upload(self, what: str, waits: bool) -> None:
        """Data of the host is copied to the device."""
        if self._capturing is not None:
            raise Refused(f"upload while a graph is captured: {what}, at {line_of_ours()}")
        if not waits and self.kind == "mps":
            raise Refused(f"upload on mps reads memory that may be gone: {what}, at {line_of_ours()}")
        if not self._muted:
            self.counts.copies[_place()] += 1
            if waits:
                self.counts.blocking[_place()] += 1

    def launch(self, run: Callable[[], None]) -> None:
        """A kernel was launched; ``run`` repeats it."""
        if self._capturing is not None:
            self._capturing.append(run)
        elif not self._muted:
            self.counts.launches[_place()] += 1

    def on(self, device: Any) -> torch.device:
        found = torch.device(device)
        return torch.device(found.type, found.index or 0)

    # -- operations --------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on the CPU, and return what it would return on the device."""
        place = self._place(func, args, kwargs)
        own, named = _map(_inner, args), _map(_inner, kwargs)
        if isinstance(named.get("device"), torch.device):
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        out = func(*own, **named)
        if place is None:
            return out
        if _launches(func):
            self.launch(lambda: _repeat(func, own, named, out))
        if func._schema.is_mutable:
            if "out" in kwargs:
                return kwargs["out"]
            if isinstance(out, Tensor):
                return next(given for given in args if _inner(given) is own[0])
        return _map(lambda one: Placed(one, place, self) if isinstance(one, Tensor) else one, out)

    def _place(self, func: Any, args: Any, kwargs: Any) -> torch.device | None:
        """The device of an operation's result, after its rules were checked; None for the CPU."""
        name = func._schema.name
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        placed = [tensor for tensor in tensors if isinstance(tensor, Placed)]
        asked = kwargs.get("device")
        if name in _COPIES:
            return self._copied(name, args, kwargs)
        devices = {tensor.device for tensor in placed}
        host = [tensor for tensor in tensors if not isinstance(tensor, Placed) and tensor.dim()]
        if name in _INDEXING:
            self._check_indices(name, args)
        elif len(devices) > 1 or (placed and host):
            both = sorted({str(tensor.device) for tensor in (*placed, *host)})
            raise Refused(f"{name} has tensors on {' and '.join(both)}, at {line_of_ours()}")
        if placed and name in _READS:
            self.read(name)
        if asked is not None:
            return self.on(asked) if torch.device(asked).type == self.kind else None
        return args[0].device if placed and isinstance(args[0], Placed) else next(iter(devices), None)

    def _copied(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        if name == "aten::_to_copy":
            source, asked = args[0], kwargs.get("device")
            place = source.device if asked is None else self.on(asked)
            waits = not kwargs.get("non_blocking")
        else:
            place, source = args[0].device, args[1]
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        what = f"{tuple(source.shape)} {source.dtype}"
        if place.type == self.kind and not isinstance(source, Placed):
            if source.dim() or name == "aten::_to_copy":
                self.upload(what, waits)
        elif place.type != self.kind and isinstance(source, Placed):
            if not waits:
                raise Refused(f"a host read that is not waited for: {what}, at {line_of_ours()}")
            self.read(what)
        return place if place.type == self.kind else None

    @contextmanager
    def indexing(self, tensor: Placed, index: Any, value: Any = None) -> Iterator[None]:
        """Context of Python's indexing of a tensor."""
        parts = index if isinstance(index, tuple) else (index,)
        arrays = [part for part in parts if isinstance(part, list | range) or hasattr(part, "__array__")]
        for part in arrays:
            if not isinstance(part, Tensor):
                self.upload(f"an index of {len(part)}", waits=True)
        tensors = [part for part in arrays if isinstance(part, Tensor) and part.dim()]
        self._check_indices(
            "indexing", (tensor, tensors, *([] if value is None else [torch.as_tensor(value)]))
        )
        with _Launches(self):
            yield

    def _check_indices(self, name: str, args: Any) -> None:
        indices = [index for index in args[1] if index is not None]
        if not isinstance(args[0], Placed):
            if any(isinstance(index, Placed) for index in indices):
                raise Refused(
                    f"{name} has indices on {self.kind} of a tensor on the cpu, at {line_of_ours()}"
                )
            return
        others = {index.device for index in indices if isinstance(index, Placed)} - {args[0].device}
        if others:
            raise Refused(f"{name} has indices on {others.pop()} of {args[0].device}, at {line_of_ours()}")
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            value = args[2] if len(args) > 2 else None
            if value is None or value.numel() != 1 or len(indices) > 1:  # otherwise it is masked_fill
                self.read(f"{name} with a mask")
        for index in indices:
            if not isinstance(index, Placed):
                self.upload(f"an index of {tuple(index.shape)}", waits=True)

    # -- graphs ------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self, graph: Graph, *args: Any, **kwargs: Any) -> Iterator[None]:
        """``torch.cuda.graph``."""
        self._capturing = graph.calls
        try:
            yield
        finally:
            self._capturing = None

    def replayed(self) -> None:
        if not self._muted:
            self.counts.replays[_place()] += 1


class Graph:
    """``torch.cuda.CUDAGraph``: the kernels of a forward, played again on the same tensors."""

    def __init__(self, on: Accelerator) -> None:
        self.calls: list[Callable[[], None]] = []
        self._on = on

    def replay(self) -> None:
        self._on.replayed()
        with torch.inference_mode():
            for call in self.calls:
                call()


def _repeat(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Run an operation again, into the tensors that it returned before."""
    again = func(*args, **kwargs)
    for old, new in zip(_leaves([out]), _leaves([again]), strict=True):
        if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
            old.copy_(new)


# -- torch's modules -------------------------------------------------------------------------------------


class _Stream:
    def __init__(self, on: Accelerator, *args: Any) -> None:
        self._on = on

    def wait_stream(self, other: Any) -> None:
        """Order on the device, for which the host does not wait."""

    def synchronize(self) -> None:
        self._on.read("synchronize")


def _made(make: Callable[..., Tensor], on: Accelerator) -> Callable[..., Tensor]:
    """``torch.tensor``, which copies from the host within torch, where no mode sees it."""

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != on.kind:
            return make(data, device=device, **options)
        return make(data, **options).to(on.on(device))

    return made


def _patches(on: Accelerator) -> Iterator[Any]:
    """Replacements of what torch asks of a device."""
    for name in ("tensor", "as_tensor"):
        yield mock.patch.object(torch, name, _made(getattr(torch, name), on))
    if on.kind == "mps":
        yield mock.patch.object(torch.backends.mps, "is_available", lambda: True)
        yield mock.patch.object(torch.mps, "synchronize", lambda: on.read("synchronize"))
        yield mock.patch.object(torch._C, "_mps_init", lambda: None, create=True)
    else:
        found: dict[str, Any] = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: on.devices,
            "current_device": lambda: 0,
            "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
            "get_device_name": lambda device=None: "emulated",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: SimpleNamespace(
                shared_memory_per_block_optin=99 << 10
            ),
            "synchronize": lambda device=None: on.read("synchronize"),
            "empty_cache": lambda: None,
            "Stream": lambda *args: _Stream(on),
            "current_stream": lambda device=None: _Stream(on),
            "stream": nullcontext,
            "device": nullcontext,
            "graph_pool_handle": lambda: (0, 0),
            "CUDAGraph": lambda: Graph(on),
            "graph": on.capture,
        }
        for name, value in found.items():
            yield mock.patch.object(torch.cuda, name, value)
    yield from _kernels(on)


def _kernels(on: Accelerator) -> Iterator[Any]:
    """Triton's kernels run in its interpreter; each is one launch."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    from outpace.draws import draw_kernel
    from outpace.targets.gpu import invariant_kernels, tree_kernel

    # On an emulated device too.
    for module in (invariant_kernels, tree_kernel):
        yield mock.patch.object(module, "multiplies_bits", lambda rows: True)
    # One block for a row: the interpreter's time is that of its operations.
    for name in ("_BLOCK", "_WIDE"):
        yield mock.patch.object(draw_kernel, name, 1 << 14)
    real = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        own, named = _map(_inner, args), _map(_inner, kwargs)

        def run() -> None:
            real(self, *own, **named)

        run()
        if any(isinstance(leaf, Placed) for leaf in _leaves((args, kwargs))):
            on.launch(run)

    yield mock.patch.object(GridExecutor, "__call__", call)

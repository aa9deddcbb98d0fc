"""Work that stops in the middle: a function that runs a while at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
_AT_ONCE = 2**31  # products of two numbers in a piece
_ROWS = 256  # in a part of a product at least


class Errand(Generic[T]):
    """A function in a thread of its own, which runs only while another thread waits for it.

    So it can stop in the middle of a forward, with nothing changed in what it computes, and nothing runs
    beside it.

    Args:
        work: the function; it calls what it is given wherever it can stop.
        clock: function that returns the time in seconds.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T], clock: Callable[[], float]) -> None:
        self._work, self._clock = work, clock
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._until = 0.0
        self._left = self._ended = False
        self._found: T | None = None
        self._error: BaseException | None = None
        self._threads = torch.get_num_threads()  # OpenMP counts them per thread
        self._thread: threading.Thread | None = None

    def advance(self, seconds: float) -> bool:
        """Run on for about this time; return True once the function has ended."""
        self._until = self._clock() + seconds
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outpace-errand", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self._ended:
            self._thread.join()
        return self._ended

    def result(self) -> T | None:
        """What the function returned, once it has ended.

        Raises:
            BaseException: what it raised.
        """
        if self._error is not None:
            raise self._error
        return self._found

    def close(self) -> None:
        """End the function where it has stopped."""
        if self._thread is not None and self._thread.is_alive():
            self._left = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._found = self._work(self._pause)
        except BaseException as error:
            self._error = error
        finally:
            self._ended = True
            self._back.release()

    def _pause(self) -> None:
        if not self._left and self._clock() >= self._until:
            self._back.release()
            self._go.acquire()
        if self._left:
            raise _Left


class _Left(BaseException):
    """The end of a function whose result nobody needs."""


class Stopping(TorchFunctionMode):
    """A context in which this thread's work with tensors can stop: a function is called before each piece.

    A piece is a function of torch, or a part of one that takes long: a product of many rows, an attention or
    a convolution of many samples is computed some at a time. Rows and samples do not mix in these, so the
    result is the same.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__()
        self._stop = stop

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        more = kwargs or {}
        count = _parts(func, args)
        if count < 2:
            self._stop()
            return func(*args, **more)
        if func is functional.linear:
            rows, *weights = args
            parts = self._parts(func, count, [rows.flatten(0, -2)], weights, more)
            return parts.unflatten(0, rows.shape[:-1])
        cut = 3 if func is functional.scaled_dot_product_attention else 1
        return self._parts(func, count, args[:cut], args[cut:], more)

    def _parts(
        self, func: Any, count: int, samples: Seq[Tensor], others: Seq[Any], more: dict[str, Any]
    ) -> Tensor:
        """The result of a function that is called for some of its samples at a time."""
        mask = more.get("attn_mask")
        if mask is not None and mask.dim() == 4 and len(mask) == len(samples[0]):
            masks = [{"attn_mask": part} for part in mask.tensor_split(count)]
        else:
            masks = [{}] * count
        found = []
        for part, own in zip(
            zip(*(one.tensor_split(count) for one in samples), strict=True), masks, strict=True
        ):
            self._stop()
            found.append(func(*part, *others, **more | own))
        return torch.cat(found)


def _parts(func: Any, args: tuple[Any, ...]) -> int:
    """The number of parts of a function, each of about the same number of products."""
    if func is functional.linear and len(args) > 1 and args[0].dim() > 1:
        rows = args[0].numel() // args[0].shape[-1]
        return int(min(rows // _ROWS, rows * args[1].numel() // _AT_ONCE))
    if func in (functional.conv2d, functional.conv3d) and len(args) > 1:
        samples, products = len(args[0]), args[0].numel() * len(args[1])  # of patches that do not overlap
    elif func is functional.scaled_dot_product_attention and len(args) == 3 and args[0].dim() == 4:
        samples, products = len(args[0]), 2 * args[0].numel() * args[1].shape[-2]
    else:
        return 1
    return int(min(samples, products // _AT_ONCE))

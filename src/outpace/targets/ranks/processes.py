"""The processes started by a launcher such as ``torchrun``: the first controls, the others follow.

The first sends each operation once, by one broadcast, and waits for nothing but the collectives within a
forward. A process that fails writes the reason into the launcher's store, and closes its connections; the
others detect this, read the reason, and end. A process that is too slow, or dies without a message, is
detected by the time-out or by its closed connection.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from outpace.core import OutpaceError, RanksLost, first_line

_LOADING = 3600.0  # seconds that ranks may take until they are ready
_BUFFER = 8192  # bytes that one broadcast carries; a longer message takes two
_HEAD = 8
_FAILED, _OVER = "outpace/failed", "outpace/over"
_IDLE = "idle"


class Ranks:
    """This process among its peers.

    Attributes:
        rank: its number, from 0, which leads.
        size: number of processes.
        sent: bytes of the messages so far.

    Args:
        store: a store that all of them can reach.
        timeout: seconds within which every other rank must respond.
        backend: backend of the model's own collectives; messages and tokens go over gloo.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float = 120.0, backend: str = "gloo"
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.sent = 0
        self._store = PrefixStore("outpace", store)
        self._store.set_timeout(timedelta(seconds=_LOADING))
        span = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=span)
        # Not the default group, where a model's own collectives wait for each other in their order.
        self._group: Any = dist.new_group(backend="gloo", timeout=span)
        self._lock = threading.RLock()
        self._lost: RanksLost | None = None
        self._closed = threading.Event()
        self._latest = time.monotonic()
        self._ready = False
        if self.leads:
            atexit.register(self.close)

    @classmethod
    def of_launcher(cls, timeout: float = 120.0) -> Ranks:
        """The ranks of ``torchrun``, or of another launcher that sets RANK, WORLD_SIZE and MASTER_ADDR.

        Raises:
            OutpaceError: no launcher has started this process, or it started only one.
        """
        size = int(os.environ.get("WORLD_SIZE", "0"))
        if size < 2 or "RANK" not in os.environ:
            raise OutpaceError(
                "--parallel needs several processes; start them as in: "
                "torchrun --nproc-per-node 2 -m outpace generate --parallel draft ..."
            )
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=_LOADING)))
        return cls(store, rank, size, timeout, backend)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def ready(self) -> None:
        """Wait until every rank has loaded; from then on the leader sends heartbeats.

        Raises:
            RanksLost: a rank has failed, or takes more than an hour.
        """
        began = time.monotonic()
        self._store.add("ready", 1)
        while self._store.add("ready", 0) < self.size:
            if self._store.check([_OVER]):
                raise RanksLost("the first rank has ended")
            if self._store.check([_FAILED]) or time.monotonic() - began > _LOADING:
                raise self.lost(TimeoutError("the others are not ready"))
            time.sleep(0.02)
        self._ready = True
        if self.leads:
            threading.Thread(target=self._beat, name="outpace-ranks", daemon=True).start()

    # -- the leader --------------------------------------------------------------------------------------

    @contextmanager
    def telling(self, message: Any) -> Iterator[None]:
        """Send a message to all others, and run in this context the operation that they run.

        An interrupt here ends the ranks: the next use raises RanksLost.

        Raises:
            RanksLost: a rank has failed, is gone, or did not answer in time; or what was done here failed.
        """
        with self._lock:
            self.check()
            try:
                self._send(message)
                yield
            except Exception as error:
                raise self.lost(error) from error
            except BaseException as interrupt:  # the others have done what was left here
                self.lost(interrupt)
                raise

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        first = np.zeros(_BUFFER, np.uint8)
        first[:_HEAD] = np.frombuffer(len(data).to_bytes(_HEAD, "little"), np.uint8)
        room = _BUFFER - _HEAD
        first[_HEAD : _HEAD + len(data[:room])] = np.frombuffer(data[:room], np.uint8)
        dist.broadcast(torch.from_numpy(first), 0, group=self._group)
        if len(data) > room:
            dist.broadcast(torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8), 0, group=self._group)
        self.sent += len(data)
        self._latest = time.monotonic()

    def _beat(self) -> None:
        """Send heartbeats between messages, so that a dead leader is detected."""
        pause = self.timeout / 4
        while not self._closed.wait(pause):
            with self._lock:
                if self._closed.is_set() or self._lost is not None:
                    return
                if time.monotonic() - self._latest >= pause:
                    try:
                        self._send(_IDLE)
                    except Exception as error:  # reported at the next step
                        self.lost(error)
                        return

    def close(self) -> None:
        """Let the others end. (Also called when the process ends.)"""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            if self._lost is None:
                with contextlib.suppress(Exception):  # they also end when the connection is closed
                    self._store.set(_OVER, "")
                    if self._ready:
                        self._send(None)
            self._leave()

    # -- the others --------------------------------------------------------------------------------------

    def hear(self) -> Any:
        """Receive the leader's next message; None when it has ended.

        Raises:
            RanksLost: a rank has failed, or the leader is gone.
        """
        while True:
            message = self._receive()
            if message != _IDLE:
                return message

    def _receive(self) -> Any:
        first = torch.zeros(_BUFFER, dtype=torch.uint8)
        try:
            dist.broadcast(first, 0, group=self._group)
            data = first.numpy().tobytes()
            size = int.from_bytes(data[:_HEAD], "little")
            data = data[_HEAD : _HEAD + size]
            if len(data) < size:
                rest = torch.zeros(size - len(data), dtype=torch.uint8)
                dist.broadcast(rest, 0, group=self._group)
                data += rest.numpy().tobytes()
        except RuntimeError as error:
            with contextlib.suppress(Exception):  # the store may be gone with the leader
                if self._store.check([_OVER]):
                    return None
            raise self.lost(error) from error
        return pickle.loads(data)

    # -- all ---------------------------------------------------------------------------------------------

    def agree(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """The maximum over all ranks, element by element."""
        told = torch.from_numpy(tokens.copy())
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        agreed: NDArray[np.int32] = told.numpy()
        return agreed

    def check(self) -> None:
        """Raise the error that has ended the ranks, if any."""
        if self._lost is not None:
            raise self._lost
        if self._closed.is_set():
            raise RanksLost("the other ranks have ended; start them again")

    def lost(self, error: BaseException) -> RanksLost:
        """End all ranks because of an error here: report the reason if none is known, close connections."""
        if self._lost is not None:
            return self._lost
        if isinstance(error, RanksLost):
            self._lost = error
            return error
        text = f"rank {self.rank} failed: {type(error).__name__}: {error}"
        if _by_peers(error):
            late = "tim" in str(error).lower() and "out" in str(error).lower()
            text = f"rank {self.rank} has lost another rank, which left no message ({first_line(error)})"
            if late:
                text = (
                    f"rank {self.rank} had no answer from another rank for {self.timeout:g} s; give a longer "
                    "--parallel-timeout if it was still working"
                )
            time.sleep(0.2)  # the rank that closed the connection may still be writing the reason
        here = True
        try:
            agreed = self._store.compare_set(_FAILED, "", text).decode()
            here, text = agreed == text, agreed
        except Exception as gone:  # the store ended with the rank or the launcher that hosted it
            text += f" (and the store is gone: {first_line(gone)})"
        self._lost = RanksLost(f"{text}; all ranks have ended")
        self._lost.here = here
        self._leave()
        return self._lost

    def _leave(self) -> None:
        with contextlib.suppress(Exception):  # connections that are closed already
            dist.destroy_process_group()


def _by_peers(error: BaseException) -> bool:
    """True for an error of a collective, not of the work that this rank did."""
    text = str(error).lower()
    return isinstance(error, TimeoutError | dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in text for word in ("gloo", "nccl", "connection", "timed out"))
    )

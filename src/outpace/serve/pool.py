"""Pools of worker processes for work on clients' texts, which Python could not interrupt in a thread."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio

from outpace.core import first_line
from outpace.serve.errors import NotStarted, Refused
from outpace.serve.worker import HEAD

_log = logging.getLogger("outpace.serve")
_OUT_OF_TIME = 24  # SIGXCPU, which Windows does not name
_START = 120.0  # maximum seconds for the start of a process
_COMMAND = "from outpace.serve.worker import main; main()"
_THREADS = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Share:
    """The most that a job may take.

    Attributes:
        seconds: maximum time.
        memory: maximum bytes beyond those of an idle worker; on Linux.
        workers: maximum number of jobs at once.
    """

    seconds: float
    memory: int
    workers: int


class Pool:
    """Worker processes of one kind, started when they are needed.

    A worker whose job takes more than its share is killed, and the job refused; others have workers of their
    own, up to ``share.workers``.

    Args:
        kind: a key of ``outpace.serve.worker.KINDS``.
        what: what a job is, for errors.
        param: the field of a request that it comes from.
        load: makes what the workers need; called in a thread, once.
        kept: number of idle workers that stay.
    """

    def __init__(
        self,
        kind: str,
        share: Share,
        what: str,
        param: str | None = None,
        load: Callable[[], bytes] = bytes,
        kept: int = 2,
    ) -> None:
        self.share = share
        self._kind, self._what, self._param = kind, what, param
        self._load, self._kept = load, kept
        self._loaded: bytes | None = None
        self._room = asyncio.Semaphore(share.workers)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._starting = 0

    @property
    def pids(self) -> set[int]:
        """The ids of all its processes."""
        return {worker.pid for worker in self._all}

    async def run(self, job: bytes) -> Any:
        """The answer to a job, which is JSON.

        Raises:
            Refused: the job failed, or took more than its share.
            NotStarted: no worker can be started.
        """
        async with self._room:
            answer = None
            if self._idle:
                with suppress(_NotBegun):  # it ended while it waited, which is not this text's fault
                    answer = await self._answer(self._idle.pop(), job)
            if answer is None:
                answer = await self._answer(await self._started(), job)
        if "refused" in answer:
            raise Refused(400, answer["refused"], self._param)
        return answer["found"]

    async def _answer(self, worker: _Worker, job: bytes) -> Any:
        try:
            with anyio.fail_after(self.share.seconds):
                await worker.begin(job)
                answer = await worker.answer()
        except TimeoutError:
            raise self._refused(f"{self.share.seconds:g} s") from None
        except _NotBegun:
            _log.warning("a process for %s has ended between two jobs", self._what)
            raise
        except (EOFError, OSError):
            await self._end(worker)
            memory = f"{self.share.memory // 2**20} MiB of memory"
            raise self._refused(f"{self.share.seconds:g} s" if worker.late else memory) from None
        else:
            if len(self._idle) < self._kept:
                self._idle.append(worker)
            return answer
        finally:
            if worker not in self._idle:
                await self._end(worker)

    def _refused(self, share: str) -> Refused:
        return Refused(400, f"{self._what} takes more than {share}; simplify it", self._param)

    async def _started(self) -> _Worker:
        self._starting += 1
        try:
            return await self._start()
        finally:
            self._starting -= 1

    async def _start(self) -> _Worker:
        if self._loaded is None:
            try:
                self._loaded = await asyncio.to_thread(self._load)
            except Exception as error:  # pickle may raise anything
                raise NotStarted(f"no process for {self._what}: {first_line(error)}") from error
        options = {"kind": self._kind, "memory": self.share.memory, "seconds": self.share.seconds}
        worker = await _Worker.start()
        self._all.add(worker)
        try:
            with anyio.fail_after(_START):
                worker.tell(json.dumps(options).encode())
                await worker.answer(self._loaded)
        except (TimeoutError, EOFError, OSError) as error:
            await self._end(worker)
            raise NotStarted(f"a process for {self._what} did not start") from error
        except BaseException:
            await self._end(worker)
            raise
        return worker

    async def _end(self, worker: _Worker) -> None:
        self._all.discard(worker)
        await worker.end()

    async def close(self) -> None:
        """End all processes."""
        self._idle.clear()
        for worker in list(self._all):
            await self._end(worker)


class _NotBegun(Exception):
    """A process had ended before it read a job."""


class _Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> _Worker:
        """Start a process that imports from where this one does, and gets no Ctrl-C of the terminal."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        environment = os.environ | _THREADS | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", _COMMAND, stdin=pipe, stdout=pipe, stderr=null,
                start_new_session=True, env=environment,
            )
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def late(self) -> bool:
        """True if the process has ended at its limit of processor time."""
        return self._process.returncode == -_OUT_OF_TIME

    def tell(self, piece: bytes) -> None:
        """Write a piece."""
        assert self._process.stdin is not None
        self._process.stdin.write(HEAD.pack(len(piece)))
        self._process.stdin.write(piece)

    async def begin(self, job: bytes) -> None:
        """Write a job, and wait until the process has read it.

        Raises:
            _NotBegun: the process had ended before.
        """
        try:
            await self.answer(job)
        except (EOFError, OSError):
            raise _NotBegun from None

    async def answer(self, piece: bytes | None = None) -> Any:
        """Read an answer, after writing a piece.

        Raises:
            EOFError, OSError: the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        if piece is not None:
            self.tell(piece)
            await self._process.stdin.drain()
        (size,) = HEAD.unpack(await self._process.stdout.readexactly(HEAD.size))
        return json.loads(await self._process.stdout.readexactly(size))

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        if self._process.returncode is None:
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

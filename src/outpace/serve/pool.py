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
from pathlib import Path
from typing import Any

import anyio

from outpace.core import first_line
from outpace.serve.errors import NotStarted, Refused, later
from outpace.serve.totals import CLIENT, Turns
from outpace.serve.worker import HEAD

_log = logging.getLogger("outpace.serve")
_OUT_OF_TIME = 24  # SIGXCPU, which Windows does not name
_MOST = 8  # workers at once, each with memory of its own
_START = 120.0  # maximum seconds for the start of a process
_PATIENCE = 10  # times its seconds that a job may take by the clock
_KILLED = -9, -15  # SIGKILL, SIGTERM
_COMMAND = "from outpace.serve.worker import main; main()"
_THREADS = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def spare(own: int = 0) -> int:
    """The number of jobs at once that leaves the engine a core, at least 1; of ``own`` cores, or all if 0."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST, max(1, min(cores, own or cores) - 1))


@dataclass(frozen=True)
class JobLimit:
    """The most that a job may take.

    Attributes:
        seconds: maximum time of a processor; of the clock, ten times that, since workers give way to others.
        memory: maximum bytes beyond those of an idle worker; on Linux.
    """

    seconds: float
    memory: int


class WorkerPool:
    """Worker processes of one kind, started when they are needed.

    A worker whose job takes more than its share is killed, and the job refused; others have workers of their
    own.

    Args:
        kind: a key of ``outpace.serve.worker.KINDS``.
        turns: places for jobs, which pools may share.
        what: what a job is, for errors.
        param: the field of a request that it comes from.
        load: makes what the workers need; called in a thread, once.
        kept: number of idle workers that stay.
    """

    def __init__(
        self,
        kind: str,
        share: JobLimit,
        turns: Turns,
        what: str,
        param: str | None = None,
        load: Callable[[], bytes] = bytes,
        kept: int = 2,
    ) -> None:
        self.share = share
        self._kind, self._what, self._param = kind, what, param
        self._load, self._kept = load, kept
        self._loaded: bytes | None = None
        self._turns = turns
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
        async with self._turns.place(CLIENT.get()):
            answer = None
            while answer is None and self._idle:
                with suppress(_NotBegun):  # it ended while it waited, which is not this text's fault
                    answer = await self._answer(self._idle.pop(), job)
            if answer is None:
                answer = await self._answer(await self._started(), job)
        if "refused" in answer:
            raise Refused(400, answer["refused"], self._param)
        return answer["found"]

    async def _answer(self, worker: _Worker, job: bytes) -> Any:
        try:
            answer = await self._within(worker, job)
        except TimeoutError:
            raise self._refused(f"{self.share.seconds:g} s") from None
        except _NotBegun:
            _log.warning("a process for %s has ended between two jobs", self._what)
            raise
        except (EOFError, OSError):
            await self._end(worker)
            if worker.killed:
                raise later(503, f"{self._what} was interrupted; try again", "interrupted", 1) from None
            memory = f"{self.share.memory // 2**20} MiB of memory"
            raise self._refused(f"{self.share.seconds:g} s" if worker.late else memory) from None
        else:
            if len(self._idle) < self._kept:
                self._idle.append(worker)
            return answer
        finally:
            if worker not in self._idle:
                await self._end(worker)

    async def _within(self, worker: _Worker, job: bytes) -> Any:
        """The answer of a worker to a job."""
        work = asyncio.ensure_future(worker.work(job))
        seconds, before = self.share.seconds, worker.seconds
        try:
            for _ in range(_PATIENCE):
                await asyncio.wait({work}, timeout=seconds)
                if work.done():
                    return work.result()
                spent = worker.seconds
                if before is None or spent is None or spent - before >= seconds:
                    break
            raise TimeoutError
        finally:
            work.cancel()

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

    @property
    def killed(self) -> bool:
        """True if the process was killed, by the system or a person."""
        return self._process.returncode in _KILLED

    @property
    def seconds(self) -> float | None:
        """Processor time of the process; None if the system does not say."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def tell(self, piece: bytes) -> None:
        """Write a piece.

        Raises:
            OSError: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(HEAD.pack(len(piece)))
            self._process.stdin.write(piece)
        except RuntimeError as error:  # uvloop's, of a pipe that it has closed
            raise BrokenPipeError(str(error)) from None

    async def work(self, job: bytes) -> Any:
        """The answer to a job."""
        try:
            await self.answer(job)
        except (EOFError, OSError):
            raise _NotBegun from None
        return await self.answer()

    async def answer(self, piece: bytes | None = None) -> Any:
        """Read an answer, after writing a piece."""
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

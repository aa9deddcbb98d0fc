"""Other engines as methods of the benchmark, each in a process and an environment of its own.

A worker script of ours is run by the environment's Python. It knows nothing of outpace: it reads one JSON
object a line and answers with one. The first says what to load, the others what to decode. The times are the
worker's own, so the pipe between the processes is not counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch

from outpace.bench.runs import Method, Request, Run
from outpace.core import OutpaceError

_SCRIPT = Path(__file__).parent / "workers" / "worker.py"
_DECODER = {"vllm": "vllm_worker", "llama.cpp": "llama_cpp_worker"}
_MODULE = {"vllm": "vllm", "llama.cpp": "llama_cpp"}
_PACKAGE = {"vllm": "vllm", "llama.cpp": "llama-cpp-python"}
_LONE = ("llama.cpp",)
_OURS = ("PYTHONPATH", "PYTHONHOME")  # of this environment, not of the worker's
# On a CPU, vLLM warns that its speculative decoding is much slower without this one, which comes with it.
_PRELOADED = {"vllm": Path("lib", "libiomp5.so")}
# Threads of Intel's and LLVM's OpenMP that have nothing to do turn for 200 ms by default, and so into the run
# of the next method. These are the values that vLLM itself takes on a CPU: one millisecond, without the
# processor's own pause. GNU's, which torch and llama.cpp come with, reads neither; it turns for milliseconds.
_RESTING = {"KMP_BLOCKTIME": "1", "KMP_TPAUSE": "0"}
_SECONDS_TO_END = 10.0


class Worker:
    """A method of another library.

    Args:
        name: in the report.
        command: what starts the worker.
        load: what it is told first.
        promised: whether its outputs are to equal those of plain decoding.
        preloaded: a library that its process loads first.
        lone: takes one prompt at a time only.

    Attributes:
        versions: of Python and of the packages that matter, in its environment.

    Raises:
        OutpaceError: it did not start; the message is its own.
    """

    peer = True
    lossy = False
    adaptive = False
    verifier = ""

    def __init__(
        self,
        name: str,
        command: list[str],
        load: Mapping[str, Any],
        promised: bool,
        preloaded: Path | None = None,
        lone: bool = False,
    ) -> None:
        self.name = name
        self.promised = promised
        self.lone = lone
        self._fresh = True
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(load["threads"], torch.device(load["device"]), preloaded),
            start_new_session=True,  # Ctrl-C is for us; the worker ends when its input does
        )
        try:
            self.versions: dict[str, str] = self._ask(load)["versions"]
        except BaseException:
            self._end(0.0)
            raise

    def begin(self, anew: bool = False) -> None:
        """What a drafter remembers of earlier outputs is forgotten with the next request."""
        self._fresh = True

    def run(self, request: Request) -> Run:
        """Decode.

        Raises:
            OutpaceError: the worker failed; the message is its own.
        """
        answer = self._ask(
            {
                "prompts": [list(prompt) for prompt in request.prompts],
                "max_new_tokens": request.max_new_tokens,
                "temperature": request.temperature,
                "seed": request.seeds[0] % 2**31,
                "ends": request.ends,
                "fresh": self._fresh,
            }
        )
        self._fresh = False
        return Run(
            outputs=answer["outputs"],
            seconds=answer["seconds"],
            first_seconds=answer["first_seconds"],
            first_tokens=answer["first_tokens"],
            forwards=answer["forwards"],
            steps=answer["steps"],
            drafted=answer["drafted"],
            accepted=answer["accepted"],
            accepted_at=answer.get("accepted_at", []),
        )

    def close(self) -> None:
        """End the process: its input is closed, and it is stopped if that is not enough."""
        self._end(_SECONDS_TO_END)

    def _end(self, patience: float) -> None:
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # it has ended before
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        _kill_all(process)
        process.wait()
        self._log.close()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """One line to the worker, one line back."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise OutpaceError(f"{self.name} ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OutpaceError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        """The last line that it wrote to standard error."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}, without a word"


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and those that it has started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


class Failed:
    """A method that could not be started: its row says why."""

    peer = True
    promised = False
    lossy = False
    adaptive = False
    lone = False
    verifier = ""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def begin(self, anew: bool = False) -> None:
        """Nothing to forget."""

    def run(self, request: Request) -> Run:
        """Say why it could not be started.

        Raises:
            OutpaceError: always, with the reason.
        """
        raise OutpaceError(self._reason)

    def close(self) -> None:
        """Nothing is held."""


def worker_of(
    library: str, kind: str, environment: Path | None, load: Mapping[str, Any], promised: bool
) -> Method:
    """Start a library's worker.

    A library that is there and does not start, or lacks what one of its methods needs, fails its row.

    Args:
        environment: a virtual environment or its Python; None is this one.

    Raises:
        OutpaceError: the library is not installed there.
    """
    python = python_of(library, environment)
    command = [str(python), str(_SCRIPT), _DECODER[library]]
    name = f"{library}:{kind}"
    preloaded = python.parent.parent / _PRELOADED[library] if library in _PRELOADED else None
    try:
        return Worker(name, command, {**load, "kind": kind}, promised, preloaded, library in _LONE)
    except OutpaceError as error:
        return Failed(name, str(error))


def _environment(threads: int, device: torch.device, preloaded: Path | None) -> dict[str, str]:
    """The variables that a worker sees: not where our packages lie; as many threads, and the device, that we
    use."""
    found = {name: value for name, value in os.environ.items() if name not in _OURS}
    found["OMP_NUM_THREADS"] = str(threads)
    found["CUDA_VISIBLE_DEVICES"] = _visible(device)
    if device.type == "cpu":
        found = {**_RESTING, **found}
    if preloaded is not None and preloaded.is_file():
        found.setdefault("LD_PRELOAD", str(preloaded.absolute()))
    return found


def _visible(device: torch.device) -> str:
    """The one device that a worker may see, as the driver counts them: ours are those that we may see."""
    if device.type != "cuda":
        return ""
    place = device.index or 0
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(place) if seen is None else seen.split(",")[place].strip()


def versions_of(methods: Seq[Method]) -> dict[str, dict[str, str]]:
    """By library, the versions in the environments of the methods that run in one."""
    return {
        method.name.partition(":")[0]: method.versions for method in methods if isinstance(method, Worker)
    }


def python_of(library: str, environment: Path | None) -> Path:
    """The Python that a library is installed for.

    Raises:
        OutpaceError: there is none, or the library is not installed for it.
    """
    package, remedy = _PACKAGE[library], f"give its environment, --peers {library}=/path/to/venv"
    if environment is None:
        if find_spec(_MODULE[library]) is None:
            raise OutpaceError(f"{library} is not installed here; pip install {package}, or {remedy}")
        return Path(sys.executable)
    python = environment / "bin" / "python" if environment.is_dir() else environment
    if environment.is_dir() and os.name == "nt":
        python = environment / "Scripts" / "python.exe"
    if not python.is_file():
        raise OutpaceError(f"{environment} is no environment: there is no {python}; {remedy}")
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({_MODULE[library]!r}) is None)"
    try:
        done = subprocess.run([python, "-c", probe], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OutpaceError(
            f"{python} does not run: {getattr(error, 'strerror', None) or error}; {remedy}"
        ) from None
    if done.returncode:
        raise OutpaceError(f"{library} is not installed in {environment}; {python} -m pip install {package}")
    return python

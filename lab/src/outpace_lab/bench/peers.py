"""Other engines as methods of the benchmark, each in a separate process and environment.

The environment's Python runs outpace's worker script, which does not import outpace: it reads one JSON object
per line and answers with one. The first requests loading a model, the others decoding. The worker measures
the times, so the pipe between the processes is not included.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch

from outpace.bench.peers import Library, PeerOptions
from outpace.bench.runs import Method, MethodRun, PromptBatch
from outpace.cli import screen
from outpace.core import OutpaceError
from outpace.loading import Loaded
from outpace.names import is_gguf
from outpace.testing.gguf import write_gguf

_SCRIPT = Path(__file__).parent / "workers" / "worker.py"
READ_GGUF = ("llama.cpp", "llama-server")
_DECODER = {"vllm": "vllm_worker", "llama.cpp": "llama_cpp_worker", "llama-server": "llama_server_worker"}
_MODULE = {"vllm": "vllm", "llama.cpp": "llama_cpp", "llama-server": "xllamacpp"}
_PACKAGE = {"vllm": "vllm", "llama.cpp": "llama-cpp-python", "llama-server": "xllamacpp"}
_OURS = ("PYTHONPATH", "PYTHONHOME")  # for this environment, not the worker's
# On a CPU, vLLM warns that its speculative decoding is much slower without this library, which it ships.
_PRELOADED = {"vllm": Path("lib", "libiomp5.so")}
# Idle threads of Intel's and LLVM's OpenMP spin for 200 ms by default, into the run of the next method.
# These are the values that vLLM itself uses on a CPU: one millisecond, without the pause instruction.
# GNU's OpenMP, which torch and llama.cpp ship, ignores both; it spins for milliseconds.
_RESTING = {"KMP_BLOCKTIME": "1", "KMP_TPAUSE": "0"}
_SECONDS_TO_END = 10.0


class Worker(Method):
    """A method of another library.

    Args:
        name: name in the report.
        command: command that starts the worker.
        load: the first request.
        promised: its outputs are promised to equal plain decoding's.
        preloaded: a library that its process loads first.
        lone: it supports only one prompt at a time.

    Raises:
        OutpaceError: it did not start; the message is the worker's.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        load: Mapping[str, Any],
        promised: bool,
        preloaded: Path | None = None,
        lone: bool = False,
    ) -> None:
        super().__init__(name, promised)
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
            self.versions = self._ask(load)["versions"]
        except BaseException:
            self._end(0.0)
            raise

    def begin(self, anew: bool = False) -> None:
        """Make the drafter forget earlier outputs at the next request."""
        self._fresh = True

    def run(self, request: PromptBatch) -> MethodRun:
        """Decode.

        Raises:
            OutpaceError: the worker failed; the message is the worker's.
        """
        question = {
            "prompts": [list(prompt) for prompt in request.prompts],
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seeds[0] % 2**31,
            "ends": request.ends,
            "fresh": self._fresh,
        }
        answer = self._ask(question)
        self._fresh = False
        return MethodRun(**answer)

    def close(self) -> None:
        """End the process: close its input, and kill it if it does not end."""
        self._end(_SECONDS_TO_END)

    def _end(self, patience: float) -> None:
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # it has already ended
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        _kill_all(process)
        process.wait()
        self._log.close()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line to the worker and read its answer."""
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
        """Read the last line of its standard error."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}, without a message"


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and those that it has started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


class Failed(Method):
    """A method that could not be started; its row states the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, promised=False)
        self._reason = reason

    def run(self, request: PromptBatch) -> MethodRun:
        """Raise the error.

        Raises:
            OutpaceError: always, with the reason.
        """
        raise OutpaceError(self._reason)


def worker_of(
    library: str, kind: str, environment: Path | None, load: Mapping[str, Any], promised: bool
) -> Method:
    """Start a library's worker.

    If a library is installed but does not start, or lacks a requirement of the method, that row fails.

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
        return Worker(name, command, {**load, "kind": kind}, promised, preloaded, library in READ_GGUF)
    except OutpaceError as error:
        return Failed(name, str(error))


def _environment(threads: int, device: torch.device, preloaded: Path | None) -> dict[str, str]:
    """Environment variables of a worker: this process's threads and device, but not its package paths."""
    found = {name: value for name, value in os.environ.items() if name not in _OURS}
    found["OMP_NUM_THREADS"] = str(threads)
    found["CUDA_VISIBLE_DEVICES"] = _visible(device)
    if device.type == "cpu":
        found = {**_RESTING, **found}
    if preloaded is not None and preloaded.is_file():
        found.setdefault("LD_PRELOAD", str(preloaded.absolute()))
    return found


def _visible(device: torch.device) -> str:
    """The driver's number of the one device that a worker may see, given this process's visible devices."""
    if device.type != "cuda":
        return ""
    place = device.index or 0
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(place) if seen is None else seen.split(",")[place].strip()


def python_of(library: str, environment: Path | None) -> Path:
    """Find the Python that has a library installed.

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
        raise OutpaceError(f"{environment} is not an environment: there is no {python}; {remedy}")
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


def _made(library: str, subject: Loaded, kind: str, environment: Path | None, options: PeerOptions) -> Method:
    """Make a library's method for a model that is in a folder, a GGUF file, or in memory for llama.cpp."""
    source = subject.source
    if library in READ_GGUF:
        source = str(_weights(library, subject, options))
    if not source:
        raise OutpaceError(
            f"{library} loads a model from its folder, and {subject.name} is in memory alone; write it "
            "with `outpace grow --out DIR`, and give --model DIR in place of --like"
        )
    return worker_of(
        library,
        kind,
        environment,
        {
            "model": source,
            # Dtype of keys and values too: llama.cpp's default for a quantised model.
            "dtype": "float16" if is_gguf(subject.source) else subject.dtype,
            "device": subject.device,
            "length": options.length,
            "threads": torch.get_num_threads(),
            "eos": sorted(subject.target.eos_token_ids),
        },
        # Where an end token is ignored, llama-server draws another token instead of continuing after it.
        promised=options.temperature == 0 and library != "llama-server",
    )


def _weights(library: str, subject: Loaded, options: PeerOptions) -> Path:
    """The model's weights for llama.cpp: the given file, the model's own, or one converted from it.

    Raises:
        OutpaceError: there is no such file, or the model cannot be converted.
    """
    if options.weights is not None:
        if not options.weights.is_file():
            raise OutpaceError(
                f"no such file: {options.weights}; --gguf is the model's weights for llama.cpp"
            )
        return options.weights
    if is_gguf(subject.source):
        return Path(subject.source)
    weights = subject.target.model
    if weights is None or options.folder is None:
        raise OutpaceError(f"{library} as a peer needs a transformers model; use --peers none")
    file = options.folder / "model.gguf"
    if not file.exists():  # another method of llama.cpp has written it
        with screen.busy("writing the model for llama.cpp ..."):
            try:
                write_gguf(weights, file, subject.dtype, subject.tokenizer)
            except OutpaceError as error:
                raise type(error)(
                    f"{error}; or give --gguf FILE of `outpace bench lab`, of the same model"
                ) from None
    return file


# Entry points of the group ``outpace.peers``.
VLLM = Library(("plain", "ngram", "suffix"), partial(_made, "vllm"))
LLAMA_CPP = Library(("plain", "prompt_lookup"), partial(_made, "llama.cpp"))
LLAMA_SERVER = Library(("plain", "ngram-mod", "ngram-simple"), partial(_made, "llama-server"))

"""llama.cpp as a library: loaded on first use, with its log in Python's and its failures as errors.

llama-cpp-python's low-level module is used; its ``Llama`` class is not.
"""

from __future__ import annotations

import ctypes
import logging
import re
import weakref
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import OutpaceError, UnsupportedModel, install
from outpace.files import check_plain
from outpace.targets.llamacpp.header import check_header

LEAST_VERSION = (0, 3, 36)
ROWS = 512  # maximum rows of a decode; a larger forward consists of several
_PADDING = 31  # maximum rows added to a decode
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_DAMAGED = re.compile("corrupted|incomplete|failed to read|file bounds|unexpectedly reached end|tensor data")
_BUFFER = re.compile(r"(\S+) model buffer size")
_UNREPACKED = {"CPU", "CPU_Mapped"}  # buffers of weights as they are in the file
_UNKNOWN = re.compile("unknown (?:model )?architecture: '([^']*)'")

_log = logging.getLogger("outpace.llamacpp")
_log.addHandler(logging.NullHandler())  # nothing on the terminal unless the program configures it
# ggml's levels: debug, info, warning, error; any other continues the line before. Its info is verbose.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}


class _Log:
    """llama.cpp's log, line by line.

    An exception cannot leave a callback: Ctrl-C in one is kept for ``raise_interrupt``.

    Attributes:
        errors: the latest errors.
        buffers: names of the buffers that the weights of the latest model are in.
        callback: the function that the library calls; this reference keeps it alive.
    """

    def __init__(self) -> None:
        self.callback: Any = None
        self.errors: deque[str] = deque(maxlen=16)
        self.buffers: set[str] = set()
        self._level, self._text = logging.DEBUG, ""
        self._interrupt: KeyboardInterrupt | None = None

    def __call__(self, level: int, text: bytes, data: Any) -> None:
        try:
            self._write(level, text)
        except KeyboardInterrupt as error:
            self._interrupt = error

    def raise_interrupt(self) -> None:
        """Raise the KeyboardInterrupt that came while the library wrote, if one did."""
        error, self._interrupt = self._interrupt, None
        if error is not None:
            raise error

    def _write(self, level: int, text: bytes) -> None:
        self._level = _LEVELS.get(level, self._level)
        self._text += text.decode(errors="replace")
        *lines, self._text = self._text.split("\n")
        for line in filter(str.strip, lines):
            _log.log(self._level, "%s", line)
            self.buffers.update(_BUFFER.findall(line))
            if self._level == logging.ERROR:
                self.errors.append(line)


@lru_cache(maxsize=1)
def log() -> _Log:
    """The log of this process."""
    return _Log()


def _remedy() -> str:
    return f"{install('llamacpp')} --upgrade (it compiles llama.cpp, which takes about ten minutes)"


@lru_cache(maxsize=1)
def library() -> Any:
    """llama-cpp-python's low-level module, ready for use.

    Raises:
        OutpaceError: it is missing, too old, or its library does not load.
    """
    try:
        found: Any = import_module("llama_cpp")
    except ImportError as error:
        raise OutpaceError(
            f"GGUF files run through llama.cpp, which is not installed: {_remedy()}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise OutpaceError(f"llama-cpp-python is installed, but does not load: {error}") from error
    version = str(getattr(found, "__version__", "0"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise OutpaceError(f"llama-cpp-python {version} is too old, {least} or later is needed: {_remedy()}")
    log().callback = found.llama_log_callback(log())
    found.llama_log_set(log().callback, ctypes.c_void_p(0))
    found.llama_backend_init()
    return found


def last_error() -> str:
    """The last error in llama.cpp's log, without the function that it names; empty if there is none."""
    errors = log().errors
    return errors[-1].partition(": ")[2] or errors[-1] if errors else ""


def check_file(path: Path) -> None:
    """Refuse a path that is not a GGUF file or the first part of a complete split one.

    Raises:
        OutpaceError: the message gives the reason and the remedy.
    """
    if path.is_dir():
        raise OutpaceError(f"{path} is a folder; give the .gguf file in it")
    if not path.exists():
        raise OutpaceError(f"no such file: {path}")
    check_plain(path)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise OutpaceError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise OutpaceError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    check_header(path)
    if (split := _SPLIT.fullmatch(path.name)) is None:
        return
    stem, number, count, suffix = split.groups()
    first = f"{stem}-00001-of-{count}{suffix}"
    if int(number) != 1:
        raise OutpaceError(f"{path.name} is part {int(number)} of a split file; give the first part, {first}")
    parts = parts_of(path)
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise OutpaceError(f"{path.name} is the first of {len(parts)} parts; missing beside it: {missing[0]}")
    for part in parts[1:]:
        check_header(part)


def parts_of(path: Path) -> list[Path]:
    """A file, or all parts of the split one whose first part it is."""
    if (split := _SPLIT.fullmatch(path.name)) is None:
        return [path]
    stem, _, count, suffix = split.groups()
    names = [f"{stem}-{part:05}-of-{count}{suffix}" for part in range(1, int(count) + 1)]
    return [path.with_name(name) for name in names]


class LlamaModel:
    """A model in llama.cpp, freed with the last reference to it.

    Args:
        repack: repack weights for the processor as far as llama.cpp can, its default.
        weights: load the weights; otherwise only the vocabulary and the metadata.

    Attributes:
        pointer: pointer to llama.cpp's model.
        repack: as given.
        repacked: whether any weights on the CPU were repacked.
        vocabulary: pointer to llama.cpp's vocabulary.

    Raises:
        OutpaceError: the file cannot be loaded. UnsupportedModel: llama.cpp does not know its architecture.
    """

    def __init__(self, path: Path, n_gpu_layers: int, repack: bool = True, weights: bool = True) -> None:
        lib = library()
        if n_gpu_layers and not lib.llama_supports_gpu_offload():
            raise OutpaceError(
                f"n_gpu_layers={n_gpu_layers}: this llama-cpp-python was built for the CPU alone; leave it "
                "out, or build it for your GPU (its page on PyPI explains how)"
            )
        params = lib.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = n_gpu_layers, repack
        params.vocab_only = not weights
        log().errors.clear()
        log().buffers.clear()
        self.path, self.repack = path, repack
        self.pointer = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise _refusal(path, list(log().errors))
        weakref.finalize(self, lib.llama_model_free, self.pointer)
        log().raise_interrupt()
        self.repacked = not log().buffers <= _UNREPACKED
        self.vocabulary = lib.llama_model_get_vocab(self.pointer)

    def text(self, key: str) -> str | None:
        """A value of the file's metadata, as text; None if there is none."""
        lib = library()
        size = lib.llama_model_meta_val_str(self.pointer, key.encode(), ctypes.create_string_buffer(1), 1)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, size + 1)
        return buffer.value.decode(errors="replace")

    @property
    def description(self) -> str:
        """Architecture, size and quantisation in llama.cpp's words: "llama 0.1B Q8_0"."""
        buffer = ctypes.create_string_buffer(128)
        library().llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode(errors="replace")


def _refusal(path: Path, errors: list[str]) -> OutpaceError:
    """The error for a file that does not load, from llama.cpp's log."""
    told = "; ".join(errors)
    if unknown := _UNKNOWN.search(told):
        version = library().__version__
        return UnsupportedModel(
            f"{path}: the llama.cpp in llama-cpp-python {version} does not know the architecture "
            f"{unknown[1]!r}; upgrade llama-cpp-python, or use another model"
        )
    reason = errors[0].partition(": ")[2] or errors[0] if errors else "llama.cpp gives no reason"
    if _DAMAGED.search(told):
        return OutpaceError(f"{path} is truncated or damaged; fetch it again ({reason})")
    return OutpaceError(f"llama.cpp cannot load {path}: {reason}")


class LlamaContext:
    """A context of llama.cpp: cells for rows, sequences over them, and the arrays of a batch.

    Args:
        cells: minimum number of rows to make room for.
        options: fields of llama.cpp's context parameters.

    Attributes:
        cells: number of rows that there is room for.
        sequences: number of sequences. 0 is reserved for padding and for copying rows, 1 for rows of texts
            that have ended.

    Raises:
        OutpaceError: memory is too small for the cells, or an option does not fit the model.
    """

    def __init__(self, model: LlamaModel, cells: int, options: dict[str, Any]) -> None:
        lib = library()
        self._lib, self._model = lib, model
        self.sequences = int(lib.llama_max_parallel_sequences())
        params = lib.llama_context_default_params()
        values = {
            "n_ctx": max(cells + _PADDING, ROWS),  # llama.cpp reduces n_batch to it, and aborts beyond that
            "n_batch": ROWS,
            "n_ubatch": ROWS,
            "n_outputs_max": ROWS,
            "n_seq_max": self.sequences,
            "kv_unified": True,
            "swa_full": True,
            "no_perf": True,
            **options,
        }
        for name, value in values.items():
            setattr(params, name, value)
        log().errors.clear()
        self._context = lib.llama_init_from_model(model.pointer, params)
        if not self._context:
            raise OutpaceError(
                f"llama.cpp cannot make a context of {cells} rows ({last_error() or 'it gives no reason'}); "
                "give the engine fewer slots, less length or less memory"
            )
        weakref.finalize(self, lib.llama_free, self._context)
        log().raise_interrupt()
        self._memory = lib.llama_get_memory(self._context)
        self.cells = int(lib.llama_n_ctx(self._context)) - _PADDING
        self._vocabulary = int(lib.llama_vocab_n_tokens(model.vocabulary))
        # The address of the last logits, and the tensors and arrays there by their numbers of rows.
        self._logits: tuple[int, dict[int, tuple[Tensor, NDArray[np.float32]]]] = 0, {}
        self._arrays()

    def _arrays(self) -> None:
        """Make a batch of arrays, which each decode overwrites."""
        number = ctypes.c_int32
        self._tokens, self._positions, self._counts = ((number * ROWS)() for _ in range(3))
        self._wanted = (ctypes.c_int8 * ROWS)()
        self._members = [(number * self.sequences)() for _ in range(ROWS)]
        addresses = [ctypes.cast(member, ctypes.POINTER(number)) for member in self._members]
        self._batch = self._lib.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._counts,
            seq_id=(ctypes.POINTER(number) * ROWS)(*addresses),
            logits=self._wanted,
        )

    def _write(self, row: int, token: int, position: int, sequences: Sequence[int], wanted: bool) -> None:
        """Write a row of the batch."""
        self._tokens[row], self._positions[row], self._wanted[row] = token, position, wanted
        self._counts[row], members = len(sequences), self._members[row]
        for index, sequence in enumerate(sequences):
            members[index] = sequence

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[bool],
        padding: int = 0,
        read: bool = False,
    ) -> tuple[Tensor, NDArray[np.float32]] | None:
        """Decode rows, at most ``ROWS`` with the padding.

        Args:
            sequences: those that each row belongs to.
            wanted: whether the logits of each row are requested.
            padding: number of further rows to compute, of sequence 0.
            read: compute their logits too: the last products are of the rows with logits alone.

        Returns:
            Logits of the requested rows, [n, vocabulary], as a tensor and as an array, both in llama.cpp's
            memory, valid until the next decode; None if none were requested.

        Raises:
            OutpaceError: llama.cpp fails.
        """
        rows = len(tokens)
        padded = rows + padding
        for row in range(rows):
            self._write(row, tokens[row], positions[row], sequences[row], wanted[row])
        for row in range(rows, padded):
            self._write(row, tokens[-1], row - rows, (0,), read)
        self._batch.n_tokens = padded
        failed = self._lib.llama_decode(self._context, self._batch)
        if padded > rows:
            self.remove(0, 0)
        log().raise_interrupt()
        if failed:
            raise OutpaceError(f"llama.cpp fails to decode {rows} rows ({failed}): {last_error()}")
        count = sum(wanted)
        if not count:
            return None
        address = ctypes.addressof(self._lib.llama_get_logits(self._context).contents)
        if address != self._logits[0]:
            self._logits = address, {}
        found = self._logits[1].get(count)
        if found is None:
            # Kept, since after a forward has emptied the processor's caches each call here is expensive.
            memory = (ctypes.c_float * (count * self._vocabulary)).from_address(address)
            logits = torch.frombuffer(memory, dtype=torch.float32).view(count, self._vocabulary)
            found = self._logits[1][count] = logits, logits.numpy()
        return found

    # -- rows of sequences, which only read and write copy -----------------------------------------------

    def remove(self, sequence: int, start: int, stop: int = -1) -> None:
        """Remove positions start .. stop - 1 from a sequence, by default all from ``start`` on."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, start, stop)

    def share(self, source: int, sequence: int, start: int, stop: int) -> None:
        """Add another sequence's positions start .. stop - 1 to a sequence; both then share the cells."""
        if start < stop:
            self._lib.llama_memory_seq_cp(self._memory, source, sequence, start, stop)

    def clear(self) -> None:
        """Free all cells."""
        self._lib.llama_memory_clear(self._memory, False)

    def read(self, sequence: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Copy a sequence's rows, for ``write``."""
        self.share(sequence, 0, start, stop)
        data = np.empty(self._lib.llama_state_seq_get_size(self._context, 0), np.uint8)
        self._lib.llama_state_seq_get_data(self._context, _bytes(data), data.size, 0)
        self.remove(0, 0)
        return data

    def write(self, data: NDArray[np.uint8], sequence: int, start: int, stop: int) -> None:
        """Write rows copied by ``read`` into a sequence, at their positions."""
        found = self._lib.llama_state_seq_set_data(self._context, _bytes(data), data.size, 0)
        if not found:
            raise OutpaceError(f"llama.cpp cannot put {stop - start} rows back: {last_error()}")
        self.share(0, sequence, start, stop)
        self.remove(0, 0)

    def take_over(self, other: LlamaContext) -> None:
        """Copy all rows of all sequences of another context of the same model and options."""
        data = np.empty(self._lib.llama_state_get_size(other._context), np.uint8)
        self._lib.llama_state_get_data(other._context, _bytes(data), data.size)
        if not self._lib.llama_state_set_data(self._context, _bytes(data), data.size):
            raise OutpaceError(f"llama.cpp cannot move its rows: {last_error()}")


def _bytes(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))

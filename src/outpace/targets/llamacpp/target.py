"""The target of a GGUF file: llama.cpp runs a tree of tokens in one decode.

``cache.py`` describes how a tree is mapped to llama.cpp's sequences. Tokens are drawn by the engine, not by
llama.cpp's samplers, so seeds work as for other targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch

from outpace.cache import Cache, Slot
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.base import Output, Rows, TargetModel, own_cache
from outpace.targets.hardware import free_bytes, processor
from outpace.targets.llamacpp.cache import LlamaCache
from outpace.targets.llamacpp.library import ROWS, LlamaContext, LlamaModel, check_file, library
from outpace.targets.llamacpp.tokenizer import LlamaTokenizer
from outpace.targets.self_test import difference, logits_by_shape

KvType = Literal["float32", "float16", "bfloat16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
_GGML = {  # ggml's numbers of dtypes
    "float32": 0, "float16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bfloat16": 30,
}  # fmt: skip
_FLOAT32_FILE = "0"  # general.file_type in the metadata of a float32 file
_TILED = ("Q4_0", "Q8_0")  # file types whose kernels multiply this many rows at once
_TILE = 4
_NEAR_TIE = 1e-4  # upper bound of float32 rounding, relative to the spread of a row's logits
_MISTAKE = 0.25  # difference relative to that spread that rounding cannot explain


@dataclass(frozen=True)
class LlamaCppOptions:
    """Options of a model that llama.cpp runs.

    Attributes:
        n_gpu_layers: number of layers on the GPU, -1 for all; 0 runs the model on the CPU.
        threads: number of llama.cpp's threads; None for torch's number.
        flash_attn: llama.cpp's flash attention; None for off in a float32 file, otherwise on. Without it
            the sums of a row depend on the other rows in the cache, and in a quantised model even a
            difference in the last bit of a sum soon grows.
        type_k, type_v: dtypes of keys and values; None for float32 in a float32 file, otherwise bfloat16 for
            keys and float16 for values. On a CPU llama.cpp's flash attention sums in one order for any number
            of rows and threads, unless both are float16 or both float32; of the other pairs measured this is
            the fastest. Quantised values need flash_attn.
        exact: pad steps of one row to two, so that a row has the same bits as in larger steps. "auto" pads if
            a single row would differ by more than float32 rounding and padding fixes it.
        check: run the self-test.
    """

    n_gpu_layers: int = 0
    threads: int | None = None
    flash_attn: bool | None = None
    type_k: KvType | None = None
    type_v: KvType | None = None
    exact: bool | Literal["auto"] = "auto"
    check: bool = True

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise OutpaceError(f"threads must be at least 1, not {self.threads}")
        if self.n_gpu_layers < -1:
            raise OutpaceError(f"n_gpu_layers must be at least 0, or -1 for all; not {self.n_gpu_layers}")
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in (None, *_GGML):
                raise OutpaceError(f"{name} must be one of {', '.join(_GGML)}; not {getattr(self, name)!r}")
        if (self.type_v or "").startswith("q") and self.flash_attn is False:
            raise OutpaceError(f"type_v={self.type_v} needs flash attention; leave flash_attn=false out")
        if self.exact not in (True, False, "auto"):
            raise OutpaceError(f"exact must be true, false or auto, not {self.exact!r}")


class LlamaCppTarget(TargetModel):
    """A model in a GGUF file.

    Construction runs a few short forwards, to test that a tree has the logits of its paths.

    Args:
        path: the file; the first part of a split one.
        options: fields of ``LlamaCppOptions``.

    Attributes:
        tokenizer: the file's tokenizer.
        options: the given options.
        row_bytes: bytes of the keys and values of a row.

    Raises:
        OutpaceError: llama-cpp-python is missing or too old, or the file cannot be loaded; the message gives
            the reason and the remedy.
        UnsupportedModel: llama.cpp does not support the architecture, or its state cannot be rolled back.
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        try:
            self.options = LlamaCppOptions(**options)
        except TypeError as error:
            raise OutpaceError(f"options of a GGUF file: {error}") from None
        self.path = Path(path).expanduser()
        check_file(self.path)
        lib = library()
        self._weights = LlamaModel(self.path, self.options.n_gpu_layers)
        _refuse_state(self._weights)
        self.tokenizer = LlamaTokenizer(self._weights)
        self.vocabulary = int(lib.llama_vocab_n_tokens(self._weights.vocabulary))
        self.context = int(lib.llama_model_n_ctx_train(self._weights.pointer)) or None
        self.eos_token_ids = self.tokenizer.end_tokens
        self.max_leaves = int(lib.llama_max_parallel_sequences()) // 2 - 1
        self.inexact = self._order_of_sums() or "not tested"
        self._least = 2 if self.options.exact is True else 1
        self._tiled = self.file_type in _TILED and not self.options.n_gpu_layers
        self._times: list[tuple[int, float]] | None = None  # rows and seconds of forwards of the self-test
        self.row_bytes = 0
        self.row_bytes = self._measured_row_bytes()
        if self.options.check:
            self._check()

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def file_type(self) -> str:
        """Quantisation of the weights by llama.cpp's name, for example "Q8_0"."""
        return self._weights.description.split(maxsplit=2)[-1].removeprefix("all ")

    @property
    def threads(self) -> int:
        """Number of threads of a forward."""
        return self.options.threads or torch.get_num_threads()

    @property
    def identity(self) -> str:
        numbers = int(library().llama_model_n_params(self._weights.pointer))
        places = [f"{self.options.n_gpu_layers} layers on the GPU"] if self.options.n_gpu_layers else []
        parts = ["llama.cpp", self._weights.description, f"{numbers} parameters", *places, processor()]
        return ", ".join([*parts, f"{self.threads} threads"])

    @property
    def layers(self) -> int:
        return int(library().llama_model_n_layer(self._weights.pointer))

    @property
    def _float32(self) -> bool:
        return self._weights.text("general.file_type") == _FLOAT32_FILE

    @property
    def _flash(self) -> bool:
        chosen = self.options.flash_attn
        return not self._float32 if chosen is None else chosen

    @property
    def _types(self) -> tuple[str, str]:
        """Types of keys and values."""
        usual = ("float32", "float32") if self._float32 else ("bfloat16", "float16")
        return self.options.type_k or usual[0], self.options.type_v or usual[1]

    def _context(self, cells: int) -> LlamaContext:
        self._check_room(cells)
        own = {
            "n_threads": self.threads,
            "n_threads_batch": self.threads,
            "flash_attn_type": int(self._flash),
            "type_k": _GGML[self._types[0]],
            "type_v": _GGML[self._types[1]],
        }
        return LlamaContext(self._weights, cells, own, self._padded)

    def _padded(self, rows: int) -> int:
        """The number of rows to compute for these.

        On a CPU llama.cpp's kernels for such files multiply four rows at once, and the rest one by one: in
        q4_0 three rows take longer than four, and seven than eight.
        """
        rest = rows % _TILE
        if self._tiled and (rest == _TILE - 1 or (rest == _TILE - 2 and rows > _TILE)):
            return rows + _TILE - rest
        return max(rows, self._least)

    def _check_room(self, cells: int) -> None:
        """Refuse more rows than fit into the free memory, which llama.cpp would fill without a check.

        Raises:
            OutpaceError: they do not fit.
        """
        free = None if self.options.n_gpu_layers else free_bytes(self.device)
        needed = cells * self.row_bytes
        if free is not None and needed > free:
            raise OutpaceError(
                f"{cells} rows take {needed / 1e9:.1f} GB for keys and values, and {free / 1e9:.1f} GB are "
                "free; give the engine fewer slots, less length or less memory"
            )

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> LlamaCache:
        return LlamaCache(self._context, slots, length, self.row_bytes, capacity)

    def forward(
        self,
        cache: Cache,
        feeds: Mapping[Slot, Rows],
        logits_from: int | None = 0,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        own = own_cache(self, cache, LlamaCache)
        if hidden_layers:
            raise OutpaceError("llama.cpp shares no hidden states; use a drafter without trained parts")
        began = perf_counter() if self._times is not None else 0.0
        try:
            output = self._forward(own, feeds, logits_from)
        except BaseException:
            own.abandon()
            raise
        if self._times is not None and len(feeds) == 1:
            (row,) = feeds.values()
            self._times.append((len(row.tokens), perf_counter() - began))
        return output

    def _forward(self, cache: LlamaCache, feeds: Mapping[Slot, Rows], logits_from: int | None) -> Output:
        tokens: list[int] = []
        positions: list[int] = []
        lanes: list[list[int]] = []
        wanted: list[bool] = []
        spans: dict[Slot, slice] = {}
        first = 0
        for (slot, row), places in zip(feeds.items(), cache.begin(feeds), strict=True):
            count = len(row.tokens)
            unread = count if logits_from is None else min(logits_from, count)
            tokens += row.tokens
            positions += places.positions
            lanes += places.lanes
            wanted += [False] * unread + [True] * (count - unread)
            spans[slot] = slice(first, first + count - unread)
            first += count - unread
        found = []
        for start in range(0, len(tokens), ROWS):
            part = slice(start, start + ROWS)
            pair = cache.context.decode(tokens[part], positions[part], lanes[part], wanted[part])
            if pair is not None and len(tokens) <= ROWS:
                return Output(pair[0], spans, pair=pair)
            if pair is not None:  # the next decode overwrites it
                found.append(pair[0].clone())
        if logits_from is None:
            return Output(None, {})
        return Output(torch.cat(found) if found else torch.empty(0, self.vocabulary), spans)

    # -- the self-test -----------------------------------------------------------------------------------

    def _measured_row_bytes(self) -> int:
        """Bytes of a row, from the sizes of copies: shapes of keys and values depend on the architecture."""
        cache = LlamaCache(self._context, 1, 64, 0)
        slot = cache.allocate()
        self.forward(cache, {slot: Rows([0] * 17)}, logits_from=None)
        cache.keep({slot: range(17)})
        sizes = [cache.read_rows(slot, 0, rows)[2].size for rows in (1, 17)]
        return (sizes[1] - sizes[0]) // 16

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare the logits of a text fed row by row, in chains and as a path of a tree.

        Raises:
            UnsupportedModel: they differ by more than rounding.
        """
        worst = self._off()
        if not worst <= _MISTAKE:
            raise UnsupportedModel(
                f"{self.path}: llama.cpp gives other logits for a tree of tokens than for its paths (off by "
                f"{worst:.2g} of their spread), so drafts cannot be verified with this model"
            )
        if self.options.exact == "auto" and worst > _NEAR_TIE:
            self._least = 2
            padded = self._off()
            if padded > worst / 2:
                self._least = 1  # it does not help: kernels differ for more numbers of rows
            worst = min(worst, padded)
        if not self._order_of_sums():
            self.inexact = (
                f"rows alone and among others differ by {worst:.2g} of their spread" if worst else ""
            )
            self.bit_exact = not worst

    def _off(self) -> float:
        """The largest difference between rows alone and among others, relative to their spread.

        Meanwhile forwards of one text are timed.
        """
        self._times = []
        plain, others = logits_by_shape(self)
        times, self._times = self._times[1:], None  # the first forward reads the weights from the disk
        self.seconds = {
            rows: median(seconds for width, seconds in times if width == rows)
            for rows in sorted({width for width, _ in times})
        }
        if all(torch.equal(plain, other) for other in others):
            return 0.0
        return max(difference(plain, other) for other in others)

    def _order_of_sums(self) -> str:
        """The reason why forwards may sum attention in different orders; empty if they do not."""
        if self.options.n_gpu_layers:
            return "kernels of GPUs sum in other orders for other numbers of rows"
        if not self._flash:
            return "without flash attention sums depend on the places of all rows in the cache"
        if int(library().llama_model_n_swa(self._weights.pointer)):
            return "cells outside a sliding window are reused, out of order"
        if self._types[0] == self._types[1] and self._types[0] in ("float16", "float32"):
            return "with keys and values of this type sums depend on the numbers of rows and threads"
        return ""


def _refuse_state(model: LlamaModel) -> None:
    """Refuse models in which a draft cannot be undone, and those that are not decoder-only.

    Raises:
        UnsupportedModel: the message names the reason.
    """
    lib, path = library(), model.path
    if lib.llama_model_is_recurrent(model.pointer) or lib.llama_model_is_hybrid(model.pointer):
        raise UnsupportedModel(
            f"{path} keeps a recurrent state, which cannot be undone when a draft is rejected"
        )
    if lib.llama_model_is_diffusion(model.pointer):
        raise UnsupportedModel(f"{path} is a diffusion model; outpace decodes autoregressive ones")
    if lib.llama_model_has_encoder(model.pointer) or not lib.llama_model_has_decoder(model.pointer):
        raise UnsupportedModel(f"{path} has an encoder; as GGUF outpace decodes decoder-only models")

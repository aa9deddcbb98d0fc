"""The target of a GGUF file: llama.cpp runs a tree of tokens in one decode.

``cache.py`` describes how a tree is mapped to llama.cpp's sequences. Tokens are drawn by the engine, not by
llama.cpp's samplers, so seeds work as for other targets.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import Cache
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.base import TargetModel, checked_cache
from outpace.targets.batch import Batch
from outpace.targets.hardware import free_bytes, processor
from outpace.targets.llamacpp.amx import amx_fails
from outpace.targets.llamacpp.cache import LlamaCache
from outpace.targets.llamacpp.findings import Findings, about
from outpace.targets.llamacpp.layouts import costs, repacks
from outpace.targets.llamacpp.library import ROWS, LlamaContext, LlamaModel, check_file, library
from outpace.targets.llamacpp.options import GGML_TYPES, LlamaCppOptions
from outpace.targets.llamacpp.self_test import NEAR_TIE, SelfTest, Widths
from outpace.targets.llamacpp.tokenizer import LlamaTokenizer
from outpace.targets.plan import StepPlan
from outpace.targets.rows import Output
from outpace.targets.step.record import Record

_log = logging.getLogger("outpace.llamacpp")
_FLOAT32_FILE = "0"  # general.file_type in the metadata of a float32 file
_TILED = ("Q4_0", "Q8_0")  # file types whose kernels multiply this many rows at once
_TILE = 4
_AMX = (
    "this build of llama.cpp ends the process in its kernels for AMX; to repack them for other instructions, "
    "install it again with CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-mno-amx-int8 and pip's --no-cache-dir"
)
_TRIES = 3  # texts of the self-test
_QUESTION = "rows of a GGUF file"  # that the record answers


class LlamaCppTarget(TargetModel):
    """A model in a GGUF file.

    Construction runs short forwards, to test that a tree has the logits of its paths, unless the record has
    what they found (``findings.py``).

    Args:
        path: the file; the first part of a split one.
        options: fields of ``LlamaCppOptions``.

    Attributes:
        tokenizer: the file's tokenizer.
        options: the given options.
        row_bytes: bytes of the keys and values of a row.
        widths: numbers of rows of its decodes.

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
        repack = self._may_repack()
        asked = partial(about, self.path, self.options, self.threads, repack)
        record = Record(asked) if self.options.check == "auto" else None
        known = Findings.read(record.find(question=_QUESTION)) if record else None
        self._weights = self._load(known.repack if known else repack)
        _refuse_state(self._weights)
        self.tokenizer = LlamaTokenizer(self._weights)
        self.vocabulary = int(lib.llama_vocab_n_tokens(self._weights.vocabulary))
        self.context = int(lib.llama_model_n_ctx_train(self._weights.pointer)) or None
        self.eos_token_ids = self.tokenizer.end_tokens
        self.max_leaves = int(lib.llama_max_parallel_sequences()) // 2 - 1
        self.plan = StepPlan("llama.cpp", why_inexact=self._why_inexact() or "not tested")
        if self.options.exact is True and self._why_inexact():
            raise UnsupportedModel(f"{self.path} is not bit-exact: {self._why_inexact()}; {self._remedy()}")
        self.widths = Widths()
        self._tiled = self.file_type in _TILED and not self.options.n_gpu_layers
        self._times: list[tuple[int, float]] | None = None  # rows and seconds of steps of the self-test
        self.row_bytes = 0
        self.row_bytes = self._measured_row_bytes()
        if self.options.check:
            found = known or self._tested()
            if record and not known:
                record.keep(found.text(), question=_QUESTION)
            self._take(found)

    def _may_repack(self) -> bool:
        """True if weights are to be repacked, unless the self-test finds better.

        Raises:
            OutpaceError: it was asked for, and would end the process.
        """
        fails = self.options.repack is not False and amx_fails(Path(library().__file__).with_name("lib"))
        if fails and self.options.repack:
            raise OutpaceError(f"repack=true: {_AMX}")
        if fails:
            _log.warning("weights are not repacked: %s", _AMX)
        return self.options.repack is not False and not fails

    def _load(self, repack: bool) -> LlamaModel:
        return LlamaModel(self.path, self.options.n_gpu_layers, repack)

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
    def repack(self) -> bool:
        """True if weights were repacked for the processor, as far as llama.cpp can."""
        return self._weights.repack

    @property
    def prompts_differ(self) -> bool:  # type: ignore[override]
        return self.widths.most is not None

    @property
    def identity(self) -> str:
        numbers = int(library().llama_model_n_params(self._weights.pointer))
        layers = [f"{self.options.n_gpu_layers} layers on the GPU"] if self.options.n_gpu_layers else []
        ways = [*(["not repacked"] if not self.repack else []), *filter(None, [str(self.widths)])]
        parts = ["llama.cpp", self._weights.description, f"{numbers} parameters", *layers, *ways, processor()]
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

    def _context(self, cells: int, types: tuple[str, str] | None = None) -> LlamaContext:
        self._check_room(cells)
        keys, values = types or self._types
        settings = {
            "n_threads": self.threads,
            "n_threads_batch": self.threads,
            "flash_attn_type": int(self._flash),
            "type_k": GGML_TYPES[keys],
            "type_v": GGML_TYPES[values],
        }
        return LlamaContext(self._weights, cells, settings)

    def _padded(self, rows: int) -> int:
        """The number of rows to compute for these of a step.

        On a CPU llama.cpp's kernels for such files multiply four rows at once, and the rest one by one: in
        q4_0 three rows take longer than four, and seven than eight.
        """
        rest = rows % _TILE
        if self._tiled and (rest == _TILE - 1 or (rest == _TILE - 2 and rows > _TILE)):
            return rows + _TILE - rest
        return rows

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

    def fine_cache(self, length: int) -> LlamaCache:
        """A cache for one text with keys in float32: others round small differences away."""
        return LlamaCache(partial(self._context, types=("float32", "bfloat16")), 1, length, self.row_bytes)

    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        kv = checked_cache(self, cache, LlamaCache)
        if hidden_layers:
            raise OutpaceError("llama.cpp shares no hidden states; use a drafter without trained parts")
        began = perf_counter() if self._times is not None else 0.0
        try:
            output = self._forward(kv, batch)
        except BaseException:
            kv.abandon()
            raise
        if self._times is not None and len(batch.slots) == 1 and len(batch.read):
            self._times.append((len(batch.tokens), perf_counter() - began))
        return output

    def _forward(self, cache: LlamaCache, batch: Batch) -> Output:
        places = cache.begin(batch)
        read = np.zeros(len(batch.tokens), dtype=np.bool_)
        read[batch.read] = True
        rows = _Decode(
            batch.tokens.tolist(),
            [position for fed in places for position in fed.positions],
            [lanes for fed in places for lanes in fed.lanes],
            read.tolist(),
            [
                row < prompt
                for width, prompt in zip(batch.widths.tolist(), batch.prompts.tolist(), strict=True)
                for row in range(width)
            ],
        )
        spans, first = batch.spans, len(batch.read)
        parts = self._parts(rows)
        if len(parts) == 1:
            pair = self._decode(cache.context, rows.select(parts[0]))
            if pair is not None:
                return Output(pair[0], spans, pair=pair)
        found = torch.empty(first, self.vocabulary)
        rows_read = [count_read - 1 for count_read in accumulate(rows.read)]
        for part in parts if len(parts) > 1 else ():
            pair = self._decode(cache.context, rows.select(part))
            if pair is not None:  # the next decode overwrites it
                found[[rows_read[row] for row in part if rows.read[row]]] = pair[0]
        if not first:
            return Output(None, {})
        return Output(found, spans, pair=(found, found.numpy()))

    def _parts(self, rows: _Decode) -> list[Sequence[int]]:
        """The rows of each decode. Nodes follow their parents, so a tree may be decoded in parts."""
        count = len(rows.tokens)
        if self.widths.most is None:
            return _split(range(count), ROWS)
        prompts = [row for row in range(count) if rows.prompt[row]]
        steps = [row for row in range(count) if not rows.prompt[row]]
        # A last product may be of the rows with logits alone, and these may have to be filled up too.
        spare = 0 if all(rows.read[row] for row in steps) else self.widths.least - 1
        return _split(prompts, ROWS) + _split(steps, self.widths.most - spare)

    def _decode(self, context: LlamaContext, rows: _Decode) -> tuple[Tensor, NDArray[np.float32]] | None:
        """Decode rows of prompts, or of steps, with as many more as the widths demand."""
        count, read, least = len(rows.tokens), sum(rows.read), self.widths.least
        if self.prompts_differ and rows.prompt[0]:
            padding = -count % self.widths.prompts
        elif least > 1:
            padding = max(least - (read or count), 0)
        else:
            return context.decode(*rows[:4], padding=self._padded(count) - count)
        return context.decode(*rows[:4], padding=padding, read=read > 0)

    # -- the self-test -----------------------------------------------------------------------------------

    def _measured_row_bytes(self) -> int:
        """Bytes of a row, from the sizes of copies: shapes of keys and values depend on the architecture."""
        cache = LlamaCache(self._context, 1, 64, 0)
        slot = cache.allocate()
        self.forward(cache, Batch.of({slot: [0] * 17}, None))
        cache.keep({slot: range(17)})
        sizes = [cache.read_rows(slot, 0, rows)[2].size for rows in (1, 17)]
        return (sizes[1] - sizes[0]) // 16

    @torch.inference_mode()
    def _tested(self) -> Findings:
        """Find widths at which rows keep their bits, choose the kernels, and test trees.

        Raises:
            UnsupportedModel: a tree does not equal its paths.
        """
        reason, measured = self._why_inexact(), {}
        if self.options.exact and not reason:
            measured = self._choose()
        worst, seconds = self._differences()
        if self.options.exact and reason and worst > NEAR_TIE and not self.options.n_gpu_layers:
            SelfTest(self).widths()
            less, others = self._differences()
            if less <= worst / 2:
                worst, seconds = less, others
            else:
                self.widths = Widths()
        return Findings(self.repack, self.widths, worst, dict(sorted({**seconds, **measured}.items())))

    def _take(self, found: Findings) -> None:
        """Go by the findings of the self-test.

        Raises:
            UnsupportedModel: ``exact=True`` cannot be kept.
        """
        self.widths, self.seconds = found.widths, found.seconds
        if not self._why_inexact():
            differ = f"rows alone and among others differ by {found.off:.2g} of their spread"
            self.plan = replace(self.plan, exact=not found.off, why_inexact=differ if found.off else None)
        if self.options.exact is True and not self.bit_exact:
            raise UnsupportedModel(f"{self.path} is not bit-exact: {self.why_inexact}; {self._remedy()}")

    def _choose(self) -> dict[int, float]:
        """Set the widths, and load the weights without repacking if that is better.

        Returns:
            The measured seconds of steps by their rows; none where there is no choice.
        """
        test = SelfTest(self)
        found = test.widths()
        if found == Widths() or self.options.repack is not None or not self._weights.repacked:
            return {}
        packed, caches = self._weights, [self.new_cache()]
        self._weights = self._load(repack=False)
        other = test.widths()
        caches.append(self.new_cache())
        seconds = costs(self, caches, [found, other]) if found and other else [{}, {}]
        if repacks(found, other, seconds):
            self._weights, self.widths = packed, found or Widths()
            return seconds[0]
        self.widths, self.tokenizer = other or Widths(), LlamaTokenizer(self._weights)
        return seconds[1]

    def _differences(self) -> tuple[float, dict[int, float]]:
        """The largest difference between rows alone and among others, relative to their spread.

        Returns:
            It, and the median seconds of the steps meanwhile, by their rows.

        Raises:
            UnsupportedModel: a tree does not equal its paths.
        """
        for turn in range(_TRIES):
            test = SelfTest(self, 1 + turn)  # another text than the one that gave the widths
            self._times = []
            try:
                alone = test.alone()
                spread = test.spread(alone)
                # After a text that failed, equal bits of another show nothing.
                worst = max(spread, test.tree(alone, spread), NEAR_TIE if turn else 0.0)
                break
            except UnsupportedModel as error:
                if turn == _TRIES - 1:
                    raise UnsupportedModel(
                        f"{self.path}: {error}; drafts cannot be verified with this model"
                    ) from error
            finally:
                times, self._times = self._times, None
        return worst, {
            rows: median(seconds for width, seconds in times if width == rows) for rows, _ in times
        }

    def _remedy(self) -> str:
        """The options of a model that is not bit-exact."""
        if self.options.n_gpu_layers:
            return "leave n_gpu_layers out, or exact=true"
        if self._why_inexact():
            return "give flash_attn=true,type_k=bfloat16,type_v=float16, or leave exact=true out"
        return "leave exact=true out, or take a file of another type, such as q8_0"

    def _why_inexact(self) -> str | None:
        """The reason why forwards may sum attention in different orders; None if they do not."""
        if self.options.n_gpu_layers:
            return "kernels of GPUs sum in other orders for other numbers of rows"
        if not self._flash:
            return "without flash attention sums depend on the places of all rows in the cache"
        if set(self._types) <= {"float16", "float32"}:
            return "with keys and values of this type sums depend on the numbers of rows and threads"
        return None


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


class _Decode(NamedTuple):
    """Rows of one decode of llama.cpp.

    Attributes:
        read: whether the logits of each are requested.
        prompt: whether each is a row of a prompt.
    """

    tokens: list[int]
    positions: list[int]
    lanes: list[list[int]]
    read: list[bool]
    prompt: list[bool]

    def select(self, part: Sequence[int]) -> _Decode:
        """Some of the rows."""
        if len(part) == len(self.tokens):
            return self
        return _Decode(
            [self.tokens[row] for row in part],
            [self.positions[row] for row in part],
            [self.lanes[row] for row in part],
            [self.read[row] for row in part],
            [self.prompt[row] for row in part],
        )


def _split(rows: Sequence[int], most: int) -> list[Sequence[int]]:
    return [rows[start : start + most] for start in range(0, len(rows), most)]

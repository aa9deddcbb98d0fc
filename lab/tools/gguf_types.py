"""Write the table in docs/measurements/gguf.md: SmolLM2 in llama.cpp's types, and their widths.

Run after `make real`, in the environment of `make test-llamacpp`: python lab/tools/gguf_types.py [type ...]
With types, their rows are printed and nothing is written.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace.embedded import smollm2_path
from outpace.targets import Target
from outpace.targets.batch import Batch
from outpace.targets.hardware import processor
from outpace.targets.llamacpp.library import LlamaModel, library
from outpace.testing.gguf import FILE_TYPES, quantise, write_gguf

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "gguf.md"
BEGIN, END = "<!-- types -->", "<!-- end of types -->"
_TURNS, _STEPS = 9, 8


def smollm2(path: Path) -> Path:
    """Write SmolLM2 in float32."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=torch.float32)
    write_gguf(model, path, "float32", AutoTokenizer.from_pretrained(smollm2_path()))
    return path


def how(target: Any) -> str:
    """The widths of a target in words."""
    widths = target.widths
    parts = [f"at least {widths.least}"] if widths.least > 1 else []
    parts += [f"at most {widths.most}"] if widths.most is not None else []
    return " and ".join(parts) or "any number"


class Own:
    """llama.cpp's own greedy loop, with its own defaults.

    Args:
        length: of its context.
        text: rows that it begins with.
    """

    def __init__(self, path: Path, threads: int = 1, length: int = 512, text: int = 0) -> None:
        lib = library()
        self._lib, self._model, self._text = lib, LlamaModel(path, 0), text
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = length, threads, threads
        self._context = lib.llama_init_from_model(self._model.pointer, params)
        self._size = int(lib.llama_vocab_n_tokens(self._model.vocabulary))
        self.token = 1
        if text:
            self._decode(range(10, 10 + text))

    def step(self) -> None:
        self._decode([self.token])
        logits = self._lib.llama_get_logits(self._context)
        self.token = int(np.ctypeslib.as_array(logits, (self._size,)).argmax())

    def rows(self, count: int) -> None:
        """Decode rows after the text, with all their logits, and forget them."""
        batch = self._lib.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.logits[i] = 500 + i, self._text + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        self._run(batch)
        self._lib.llama_get_logits(self._context)
        self._lib.llama_batch_free(batch)
        self._cut(self._text)

    def prompt(self, count: int) -> None:
        """Decode a prompt, with the logits of its last row; the text is then there again."""
        self._cut(0)
        for first in range(0, count, 512):
            self._decode(range(100 + first, 100 + min(first + 512, count)))
        self._lib.llama_get_logits(self._context)
        self._cut(self._text)

    def _decode(self, tokens: Sequence[int]) -> None:
        given = (ctypes.c_int32 * len(tokens))(*tokens)
        self._run(self._lib.llama_batch_get_one(given, len(tokens)))

    def _run(self, batch: Any) -> None:
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp fails to decode")

    def _cut(self, rows: int) -> None:
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), 0, rows, -1)


class Ours:
    """The same loop through a target."""

    def __init__(self, target: Any) -> None:
        self._target, self._cache, self.token = target, target.new_cache(1, 512), 1
        self._slot = self._cache.allocate()

    def step(self) -> None:
        output = self._target.forward(self._cache, Batch.of({self._slot: [self.token]}))
        self.token = int(output.array[0].argmax())
        self._cache.keep({self._slot: [0]})


def cost(target: Any, path: Path) -> float:
    """Time of a plain step as a multiple of llama.cpp's own, measured in turns."""
    both: tuple[Any, Any] = (Ours(target), Own(path))
    ratios = []
    for _ in range(_TURNS):
        seconds = []
        for one in both:
            one.step()  # the other has emptied the processor's caches
            began = perf_counter()
            for _ in range(_STEPS):
                one.step()
            seconds.append(perf_counter() - began)
        ratios.append(seconds[0] / seconds[1])
    return median(ratios)


def row(kind: str, target: Any, ratio: float) -> str:
    exact = "yes" if target.bit_exact else f"no: {target.why_inexact}"
    return f"| {kind} | {exact} | {how(target)} | {'yes' if target.repack else 'no'} | {ratio:.2f} |"


def main(kinds: list[str]) -> None:
    lines = [
        f"SmolLM2-135M on {processor()}, one thread:",
        "",
        "| type | same bits | rows of a step in one decode | repacked | plain step, of llama.cpp's own |",
        "| --- | --- | --- | --- | ---: |",
    ]
    with TemporaryDirectory() as folder:
        source = smollm2(Path(folder) / "smollm2.gguf")
        for kind in kinds or FILE_TYPES:
            path = quantise(source, kind, Path(folder) / f"{kind}.gguf")
            target = Target(path, threads=1)
            lines.append(row(kind, target, cost(target, path)))
            print(lines[-1], flush=True)
            del target
            path.unlink()
    if not kinds:
        before, rest = PAGE.read_text("utf-8").split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"]), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

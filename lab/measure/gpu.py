"""Steps and decoding on a GPU: models with random weights, with and without graphs, and transformers.

    python lab/measure/gpu.py --out RESULT.json
    python lab/measure/gpu.py --shapes llama-7b --dtypes int8 fp8 --out RESULT.json
    python lab/measure/gpu.py --device cpu --shapes tiny --dtypes float32 --batches 1 2 --context 32

Two tables for every shape, dtype and number of sequences:

- steps: median milliseconds of a forward by its rows per sequence, for the default target (dynamic), for
  fixed shapes (static: CUDA graphs), for those with the attention for trees (tree), and on a GPU for
  bit-exact ones (exact); and the share of the bandwidth roof (the least time
  to read weights, keys and values once divided by the measured one) that a step of one row reaches.
- decoding: tokens per second of plain decoding and of every drafter, with and without a governor, through
  graphs, in turns with transformers' own ``generate`` with its static cache, which it compiles on a GPU.

Text from random weights is noise that rarely repeats, so drafters show their costs here, not their gains; the
draft model is unrelated to the target and included for its costs too. Each kind of engine has its own cache:
a 13B model with 32 sequences leaves room for one on 80 GB (``--engines governed``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outpace
from outpace.bench.machine import machine
from outpace.core import Speculation
from outpace.drafters.models.draft_model import DraftModel
from outpace.files import replace_text
from outpace.targets.inputs.masks import TREE
from outpace.targets.inputs.surgery import exchange
from outpace_lab.bench.llama_shapes import SHAPES, Shape
from outpace_lab.bench.roof import Limits, measure_limits, measure_widths, wait, work_of

ALL_SHAPES = {**SHAPES, "tiny": Shape(64, 128, 2, 4, 2, 16)}
DRAFTERS = ("prompt_lookup", "suffix", "token_recycling", "jacobi", "lookahead", "draft_model")
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
# Rows are bfloat16; weights are torchao's, int8, or float8 with rows rounded to it one by one.
QUANTISED = ("int8", "fp8")


@contextmanager
def made_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Context in which tensors are made on a device, in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def quantise(model: Any, kind: str) -> None:
    """Round the weights of a model's layers by torchao; not those of the head."""
    try:
        from torchao import quantization
    except ImportError:
        raise SystemExit(f"--dtypes {kind} needs torchao: pip install torchao") from None
    how = (
        quantization.Int8WeightOnlyConfig()
        if kind == "int8"
        else quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    )
    quantization.quantize_(model.model, how)


def model_of(shape: Shape, dtype: torch.dtype, options: argparse.Namespace) -> Any:
    """A Llama of the shape with random weights."""
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=options.context + options.tokens + 2 * max(WIDTHS),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with made_on(options.device, dtype):
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def kinds_of_target(model: Any, exact: bool, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Ways to run a model's forwards, by name; ``exact`` adds bit-exact ones."""
    on_trees = exchange(model, lambda _: None, TREE)
    kinds: dict[str, Callable[[], Any]] = {
        "dynamic": lambda: outpace.Target(model, static=False, check=False),
        "static": lambda: outpace.Target(model, static=True, check=False),
        "tree": lambda: outpace.Target(on_trees, static=True, check=False),
    }
    if exact:
        kinds["exact"] = lambda: outpace.Target(model, static=True, check=False, exact=True)
    return kinds


def steps(
    kinds: dict[str, Callable[[], Any]], batch: int, limits: Limits, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Milliseconds of a forward by width, for each kind of target."""
    found = []
    for kind, make in kinds.items():
        target = make()
        seconds = measure_widths(target, options.context, WIDTHS, batch)
        work = work_of(target)
        least = work.bytes(batch, options.context) / limits.bandwidth
        found.append(
            {
                "kind": kind,
                "milliseconds": dict(zip(WIDTHS, (1e3 * one for one in seconds), strict=True)),
                "roof": least / seconds[0],
            }
        )
    return found


class Decoders:
    """Ways to decode the same prompts: name -> function that returns the tokens of each output."""

    def __init__(self, model: Any, draft: Any, batch: int, options: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(0)
        size = (batch, options.context)
        self._prompts = torch.randint(1, options.vocabulary, size, generator=generator)
        self._tokens, self._device, self._model = options.tokens, options.device, model
        target = outpace.Target(model, static=True, check=False)
        drafts = outpace.Target(draft, static=True, check=False)
        length = options.context + options.tokens + 2 * max(WIDTHS)
        self.all: dict[str, Callable[[], list[list[int]]]] = {"transformers": self._stock}
        named: dict[str, Any] = {name: name for name in options.drafters}
        if "draft_model" in named:
            named["draft_model"] = DraftModel(drafts, 4)
        for kind in options.engines:
            governed = kind == "governed"
            engine = outpace.Engine(target, drafters=named, adaptive=governed, slots=batch, length=length)
            if "none" not in self.all:
                self.all["none"] = self._through(engine, "off")
            self.all |= {f"{name}, {kind}": self._through(engine, name) for name in named}

    def _through(self, engine: outpace.Engine, drafter: str) -> Callable[[], list[list[int]]]:
        # A drafter that remembers a run's outputs would copy them in the next run.
        own = Speculation(drafter, memory="off")
        params = outpace.SamplingParams(max_new_tokens=self._tokens, ignore_eos=True, speculation=own)
        prompts = self._prompts.tolist()
        return lambda: [one.tokens for one in engine.generate(prompts, params)]

    def _stock(self) -> list[list[int]]:
        found = self._model.generate(
            self._prompts.to(self._device),
            attention_mask=torch.ones_like(self._prompts, device=self._device),
            max_new_tokens=self._tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=torch.device(self._device).type == "cpu",
        )
        tokens: list[list[int]] = found[:, self._prompts.shape[1] :].tolist()
        return tokens


def decoding(decoders: Decoders, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of each way to decode, in turns; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in decoders.all}
    outputs: dict[str, list[list[int]]] = {}
    for _ in range(options.rounds + 1):
        for name, decode in decoders.all.items():
            wait(options.device)
            began = time.perf_counter()
            outputs[name] = decode()
            wait(options.device)
            seconds[name].append(time.perf_counter() - began)
    count = sum(map(len, outputs["none"]))
    plain = outputs["none"]
    return [
        {
            "decoder": name,
            "tokens_per_second": count / statistics.median(taken[1:]),
            "over_plain": statistics.median(seconds["none"][1:]) / statistics.median(taken[1:]),
            "as_plain": sum(a == b for a, b in zip(outputs[name], plain, strict=True)) / len(plain),
        }
        for name, taken in seconds.items()
    ]


def show(title: str, steps: list[dict[str, Any]], decoders: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'step, ms by rows':<26}", *(f"{width:>8}" for width in WIDTHS), f"{'of roof':>8}")
    for row in steps:
        print(
            f"{row['kind']:<26}",
            *(f"{took:8.2f}" for took in row["milliseconds"].values()),
            f"{row['roof']:8.2f}",
        )
    print(f"{'decoding':<26} {'tokens/s':>8} {'x plain':>8} {'equal':>8}")
    for row in decoders:
        figures = (row["tokens_per_second"], row["over_plain"], row["as_plain"])
        print(f"{row['decoder']:<26}", *(f"{figure:8.2f}" for figure in figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="*", default=["llama-7b", "llama-13b"], choices=ALL_SHAPES)
    dtypes = ["bfloat16", "float16", "float32", *QUANTISED]
    parser.add_argument("--dtypes", nargs="*", default=dtypes[:1], choices=dtypes)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--drafters", nargs="*", default=DRAFTERS)
    kinds = ["governed", "ungoverned"]
    parser.add_argument("--engines", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each output")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=32000)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.shapes:
        for given in options.dtypes:
            dtype = torch.bfloat16 if given in QUANTISED else getattr(torch, given)
            model = model_of(ALL_SHAPES[name], dtype, options)
            if given in QUANTISED:
                quantise(model, given)
            draft = model_of(ALL_SHAPES["tiny" if name == "tiny" else "llama-0.1b"], dtype, options)
            limits = measure_limits(1 << 30, options.device, dtype)
            for batch in options.batches:
                exact = options.device != "cpu" and given not in QUANTISED
                found = steps(kinds_of_target(model, exact, options), batch, limits, options)
                decoders = decoding(Decoders(model, draft, batch, options), options)
                show(f"{name}, {given}, {batch} at a time", found, decoders)
                rows.append(
                    {"shape": name, "dtype": given, "batch": batch, "steps": found, "decoding": decoders}
                )
                if options.out:  # after each row, since a later one may run out of memory or time
                    result = {"command": " ".join(sys.argv), "machine": machine(options.device), "rows": rows}
                    replace_text(options.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

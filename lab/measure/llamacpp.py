"""llama.cpp and outpace on the same GGUF file, in turns: tokens per second.

llama.cpp runs through llama-cpp-python (plain, prompt lookup), and as llama-server (plain,
``--spec-type ngram-mod`` and ``ngram-simple`` with their defaults): a program given by ``--llama-server``,
whose own timings count, or, where xllamacpp is installed, its engine in this process. The wheels of xllamacpp
are built for any processor with AVX2, so its rows are compared with its own plain row too.

One prompt at a time, greedy, 64 new tokens; the time after the first step counts. A ratio is the median
over prompts of the ratio of one prompt's speeds. Processor time, or with ``--wall`` the clock's, for a
machine that does nothing else:

    taskset -c 1 python lab/measure/llamacpp.py model.gguf gsm8k,humaneval --limit 6 [--draft draft.gguf]
    python lab/measure/llamacpp.py model.gguf rewriting --threads 2 --wall [--llama-server PROGRAM]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from outpace import Engine, SamplingParams, Target
from outpace.bench.suites import load_suite
from outpace.drafters.models.draft_model import DraftModel

try:
    import xllamacpp
except ImportError:
    xllamacpp = None

LONGEST = 700  # tokens of a prompt
ROOM = 1024
DRAFTERS = {
    "none": None,
    "prompt_lookup": "prompt_lookup",
    "suffix": "suffix",
    "token_recycling": "token_recycling",
    "combined": "combined:(suffix)+(token_recycling)",
    "lookahead": "lookahead:window=4,ngram=4,guesses=4",
}
PLAIN, SERVER = "llama.cpp", "llama-server"
Run = Callable[[list[int]], tuple[Any, float]]


class Clock:
    """Seconds per run of a method over ``tokens`` tokens, from its first step's end to its last."""

    def __init__(self, wall: bool, tokens: int) -> None:
        self.tokens = tokens
        self.read = time.perf_counter if wall else time.process_time


def peer(path: str, clock: Clock, threads: int, lookup: int = 0, flash: bool = False) -> Run:
    """llama-cpp-python's loop, with its prompt lookup of ``lookup`` tokens."""
    draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
    more = {"draft_model": draft, "logits_all": draft is not None, "flash_attn": flash, "verbose": False}
    model = llama_cpp.Llama(path, n_ctx=ROOM, n_threads=threads, n_threads_batch=threads, **more)

    def run(ids: list[int]) -> tuple[list[int], float]:
        model.reset()
        output: list[int] = []
        began = 0.0
        plain = {"temp": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        for token in model.generate(ids, **plain, reset=True):
            output.append(int(token))
            if len(output) == 1:
                began = clock.read()
            if len(output) == clock.tokens:
                break
        return output, (clock.tokens - 1) / (clock.read() - began)

    return run


def server(path: str, clock: Clock, threads: int, kind: str = "") -> Run:
    """llama-server's engine, with a ``--spec-type``."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = ROOM, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity, params.cache_ram_mib = 0, 0
    if kind:
        types = xllamacpp.common_speculative_type
        params.speculative.types = [types[f"COMMON_SPECULATIVE_TYPE_{kind.upper().replace('-', '_')}"]]
    engine = xllamacpp.Server(params)

    def run(ids: list[int]) -> tuple[str, float]:
        began: list[float] = []
        texts: list[str] = []

        def told(chunk: Any) -> None:
            if not began:
                began.append(clock.read())
            found = json.loads(chunk) if isinstance(chunk, str | bytes) else chunk
            texts.append(found["choices"][0]["text"])

        asked = {"prompt": ids, "n_predict": clock.tokens, "temperature": 0.0, "ignore_eos": True}
        engine.handle_completions({**asked, "cache_prompt": False, "stream": True}, told)
        return "".join(texts), (clock.tokens - 1) / (clock.read() - began[0])

    return run


@contextmanager
def program(path: str, threads: int, binary: Path, tokens: int, kind: str = "") -> Iterator[Run]:
    """The program llama-server with a ``--spec-type``, by its own clock."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(binary), "--model", path, "--port", str(port), "--ctx-size", str(ROOM), "--parallel", "1"]
    command += ["--threads", str(threads), "--threads-batch", str(threads), "--cache-ram", "0"]
    command += ["--spec-type", kind] if kind else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"

    def run(ids: list[int]) -> tuple[str, float]:
        asked = {"prompt": ids, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
        body = json.dumps({**asked, "cache_prompt": False}).encode()
        request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            told = json.load(answer)
        times = told["timings"]
        return told["content"], (times["predicted_n"] - 1) / times["predicted_ms"] * 1e3

    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"{binary} ended with code {process.returncode}") from None
                time.sleep(0.1)
        yield run
    finally:
        process.terminate()
        process.wait()


def ours(engine: Engine, clock: Clock) -> Run:
    def run(ids: list[int]) -> tuple[list[int], float]:
        sequence = engine.add(ids, SamplingParams(max_new_tokens=clock.tokens, ignore_eos=True))
        first: tuple[float, int] | None = None
        while engine.sequences:
            engine.step()
            if first is None and sequence.output_length:
                first = clock.read(), sequence.output_length
        sequence.check()
        assert first is not None
        return list(sequence.output), (clock.tokens - first[1]) / (clock.read() - first[0])

    return run


def prompts_of(suite: str, data: Path | None, target: Any, limit: int) -> list[list[int]]:
    texts = [item.turns[0] for item in load_suite(suite, data).items if item.turns]
    prompts = [target.tokenizer(text).input_ids for text in texts]
    return [ids for ids in prompts if len(ids) < LONGEST][: limit + 1]


def measure(
    methods: dict[str, Run], plain: dict[str, str], prompts: list[list[int]], order: np.random.Generator
) -> dict[str, Any]:
    """Print each method's speed, and its ratio to plain decoding by the same library and to llama.cpp's.

    Returns each method's speeds per prompt and its number of outputs equal to plain decoding's. The first
    prompt warms up; only the others count, since some methods remember texts.
    """
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    equal = dict.fromkeys(methods, 0)
    count = len(prompts) - 1
    for turn, ids in enumerate(prompts):
        outputs = {}
        for name in order.permutation(list(methods)):
            outputs[name], speed = methods[name](ids)
            if turn:
                speeds[name].append(speed)
        for name in methods if turn else ():
            equal[name] += outputs[name] == outputs[plain[name]]
    for name, own in speeds.items():
        ratios = [
            statistics.median(one / other for one, other in zip(own, speeds[base], strict=True))
            for base in (plain[name], PLAIN)
        ]
        print(
            f"  {name:31} {statistics.median(own):6.1f} tokens/s, {ratios[0]:.2f} x {plain[name]}, "
            f"{ratios[1]:.2f} x {PLAIN}, equal {equal[name]}/{count}",
            flush=True,
        )
    return {name: {"speeds": own, "equal": equal[name]} for name, own in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("suites")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--draft", help="GGUF file of a draft model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--llama-server", type=Path, help="the program llama-server; needs --wall")
    parser.add_argument("--json", type=Path, help="write all speeds into this file")
    given = parser.parse_args()
    if given.llama_server and not given.wall:
        parser.error("--llama-server measures by the clock: add --wall")
    with ExitStack() as stack:
        compare(given, stack)


def compare(given: argparse.Namespace, stack: ExitStack) -> None:
    torch.set_num_threads(1)
    clock, path, threads = Clock(given.wall, given.tokens), given.file, given.threads
    target = Target(path, threads=threads)
    methods = {
        PLAIN: peer(path, clock, threads),
        "llama.cpp, flash attention": peer(path, clock, threads, flash=True),
        "llama.cpp, prompt lookup of 10": peer(path, clock, threads, 10),
        "llama.cpp, prompt lookup of 3": peer(path, clock, threads, 3),
    }
    plain = dict.fromkeys(methods, PLAIN)
    kinds = {SERVER: "", **{f"{SERVER}, {kind}": kind for kind in ("ngram-mod", "ngram-simple")}}
    if given.llama_server:
        methods |= {
            name: stack.enter_context(program(path, threads, given.llama_server, given.tokens, kind))
            for name, kind in kinds.items()
        }
        plain |= dict.fromkeys(kinds, SERVER)
    elif xllamacpp is not None:
        methods |= {name: server(path, clock, threads, kind) for name, kind in kinds.items()}
        plain |= dict.fromkeys(kinds, SERVER)
    drafters: dict[str, Any] = dict(DRAFTERS)
    if given.draft:
        drafters["draft_model"] = DraftModel(Target(given.draft, threads=threads))
    methods |= {name: ours(Engine(target, drafter, length=ROOM), clock) for name, drafter in drafters.items()}
    plain |= dict.fromkeys(drafters, "none")
    order = np.random.default_rng(0)
    found = {"file": Path(path).name, "threads": threads, "clock": "wall" if given.wall else "processor"}
    found |= {"tokens": clock.tokens, "suites": {}}
    for suite in given.suites.split(","):
        prompts = prompts_of(suite, given.data, target, given.limit)
        load = os.getloadavg()[0]
        print(f"{suite}, {len(prompts) - 1} prompts, load {load:.1f}", flush=True)
        result = measure(methods, plain, prompts, order)
        found["suites"][suite] = {"prompts": len(prompts) - 1, "load": load, "methods": result}
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

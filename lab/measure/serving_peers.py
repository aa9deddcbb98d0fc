"""Servers beside each other under guidellm's load: outpace plain and governed, vLLM's, llama.cpp's.

    python lab/measure/serving_peers.py --model FOLDER --data DIR --guidellm VENV/bin/guidellm \
        --vllm VENV/bin/python --llama-server FILE --dtype bfloat16 --streams 1,8,32 --cores 0 --out FILE

starts the servers, and loads one at a time, in an order that turns with each round, while the others are
stopped (SIGSTOP). The first round is not counted. One call measures one dtype; FILE keeps the results of
others, so that a measurement can be made in pieces. With one stream the engine alone, in this process, takes
part too. --cores gives all servers the same cores, and guidellm the others. Prompts are GSM8K, HumanEval and
turns of Spec-Bench in turn, greedy, without an end. No server caches prompts across requests. --vllm and
--llama-server may be left out.

Next to guidellm's figures, `processor_ms_per_token` is the processor time of a server and its children; other
load on the machine does not lengthen it much.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outpace.bench.machine import machine
from outpace.testing.gguf import write_gguf
from serving import Server, alone, processor, prompts

NAME = "served"
CONTEXT = 2048  # tokens per stream
ALL = os.sched_getaffinity(0)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@dataclass
class Process:
    """A server in a process, and what guidellm measured of it in each round."""

    name: str
    command: list[str]
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)
    running: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, log: Path, threads: int, cores: set[int]) -> None:
        given = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | self.environment
        with log.open("wb") as file:
            self.running = subprocess.Popen(
                [*self.command, "--port", str(self.port)],
                env=os.environ | given, stdout=file, stderr=file, start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip
        began = time.monotonic()
        while self.running.poll() is None and time.monotonic() - began < 400:
            try:
                urllib.request.urlopen(f"{self.url}/v1/models", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        else:
            raise SystemExit(f"{self.name} did not start:\n{log.read_text('utf-8')[-2000:]}")
        print(f"{self.name} started after {time.monotonic() - began:.0f} s", file=sys.stderr)

    def signal(self, number: int) -> None:
        if self.running is not None and self.running.poll() is None:
            os.killpg(self.running.pid, number)


def servers(given: argparse.Namespace, folder: Path) -> list[Process]:
    model, dtype = str(given.model), given.dtype
    ours = [sys.executable, "-m", "outpace", "serve", "--model", model, "--dtype", dtype, "--no-access-log"]
    ours += ["--prefix-cache", "0", "--memory", "2", "--served-model-name", NAME]
    found = [("off", [*ours, "--drafter", "none"]), ("governed", [*ours, "--drafter", given.drafter])]
    if given.vllm:
        vllm = [given.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", dtype]
        vllm += ["--max-model-len", str(CONTEXT)]
        vllm += ["--served-model-name", NAME, "--max-num-seqs", "32", "--no-enable-prefix-caching"]
        vllm += ["--disable-log-stats", *given.vllm_options.split()]
        found += [
            ("vllm", vllm),
            ("vllm ngram", [*vllm, "--speculative-config", json.dumps(NGRAM)]),
        ]
    if given.llama_server:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        file = folder / f"{dtype}.gguf"
        weights = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        write_gguf(weights, file, dtype, AutoTokenizer.from_pretrained(model))
        llama = [
            given.llama_server,
            "--model",
            str(file),
            "--alias",
            NAME,
            "--parallel",
            str(max(given.streams)),
        ]
        llama += ["--ctx-size", str(CONTEXT * max(given.streams)), "--threads", str(given.threads)]
        llama += ["--threads-batch", str(given.threads), "--cache-ram", "0", "--no-cache-prompt"]
        found.append(("llama-server", llama))
    more = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    return [
        Process(name, command, given.port + place, more.get(name.split()[0], {}))
        for place, (name, command) in enumerate(found)
    ]


@contextmanager
def started(processes: list[Process], folder: Path, threads: int, cores: set[int]) -> Iterator[None]:
    """Start the servers, stopped until their turn; end them at the end."""
    try:
        for one in processes:
            one.start(folder / f"{one.name}.log", threads, cores)
            one.signal(signal.SIGSTOP)
        yield
    finally:
        for one in processes:
            one.signal(signal.SIGKILL)


def requests(folder: Path, texts: list[str], tokens: int) -> Path:
    """The prompts as a file for guidellm."""
    path = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": text, "output_tokens_count": tokens}) for text in texts]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def measured(
    one: Process, given: argparse.Namespace, streams: int, file: Path, count: int
) -> dict[str, float]:
    """Load a server by guidellm; its figures for one round."""
    assert one.running is not None
    backend = {"kind": "openai_http", "target": one.url, "model": NAME, "request_format": "/v1/completions"}
    spec = {
        "backend": backend | {"validate_backend": False, "extras": {"body": {"temperature": 0}}},
        "profile": {"kind": "concurrent", "streams": [streams]},
        "constraints": [{"kind": "max_requests", "count": count}],
        "tokenizer": {"kind": "hf_auto", "model": str(given.model)},
        "data": [{"kind": "json_file", "path": str(file)}],
        "outputs": [{"kind": "json", "path": str(file.parent / "report.json")}],
    }
    config = file.parent / "scenario.json"
    config.write_text(json.dumps({"spec": spec}), "utf-8")
    one.signal(signal.SIGCONT)
    used = processor(one.running.pid)
    ended = subprocess.run(
        [given.guidellm, "run", "--config", str(config), "--disable-console"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}, capture_output=True,
        preexec_fn=lambda: os.sched_setaffinity(0, ALL - given.cores or ALL),
    )  # fmt: skip
    used = processor(one.running.pid) - used
    one.signal(signal.SIGSTOP)
    if ended.returncode:
        raise SystemExit(f"guidellm ended with {ended.returncode}:\n{ended.stderr.decode()[-2000:]}")
    (found,) = json.loads((file.parent / "report.json").read_text("utf-8"))["benchmarks"]
    metrics = {name: (value or {}).get("successful") for name, value in found["metrics"].items()}
    totals = found["metrics"]["request_totals"]
    if totals["successful"] < count:
        raise SystemExit(f"{one.name}: of {count} requests {totals['successful']} were answered")
    gaps, first = metrics["inter_token_latency_ms"], metrics["time_to_first_token_ms"]
    return {
        "requests_per_s": metrics["requests_per_second"]["mean"],
        "tokens_per_s": metrics["output_tokens_per_second"]["mean"],
        "first_token_ms": first["median"],
        "inter_token_p50_ms": gaps["median"],
        "inter_token_p99_ms": gaps["percentiles"]["p99"],
        "processor_ms_per_token": 1e3 * used / (count * given.tokens),
    }


def engine_alone(engine: Server, texts: list[str], tokens: int, cores: set[int]) -> dict[str, float]:
    """The engine without a server: what is lost to one."""
    os.sched_setaffinity(0, cores)
    found = alone(engine, texts, 1, tokens)
    return {
        "requests_per_s": found["requests_per_s"],
        "tokens_per_s": found["tokens_per_s"],
        "processor_ms_per_token": 1e3 * found["processor_s_per_token"],
    }


def result(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over rounds, and medians of the ratios to plain decoding in the same round."""
    table: dict[str, Any] = {}
    for name, rows in rounds.items():
        row: dict[str, Any] = {key: statistics.median(one[key] for one in rows) for key in rows[0]}
        pairs = list(zip(rows, rounds["off"], strict=True))
        row["speed_over_off"] = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)
        row["processor_speed_over_off"] = statistics.median(
            b["processor_ms_per_token"] / a["processor_ms_per_token"] for a, b in pairs
        )
        table[name] = row | {"rounds": [round(one["tokens_per_s"], 2) for one in rows]}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--guidellm", required=True)
    parser.add_argument("--vllm", default="", help="the python of an environment with vLLM")
    parser.add_argument("--vllm-options", default="", help="further options of vLLM's server")
    parser.add_argument("--llama-server", default="")
    parser.add_argument("--drafter", default="lookahead")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32])
    parser.add_argument(
        "--requests", type=int, default=0, help="per round; default: two for each stream, 4 at least"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of a server")
    parser.add_argument(
        "--cores", type=lambda text: set(numbers(text)), default=ALL,
        help="that servers run on; default: all",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8300, help="the first of five free ports")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `started`, which ends the servers
    with tempfile.TemporaryDirectory(prefix="serving-peers-") as name:
        folder = Path(name)
        processes = servers(given, folder)
        engine = Server("engine", f"local:{given.model}", more={"dtype": given.dtype})
        torch.set_num_threads(given.threads)
        with started(processes, folder, given.threads, given.cores):
            for streams in given.streams:
                keep(given, streams, rounds_of(given, streams, processes, engine, folder))


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def rounds_of(
    given: argparse.Namespace, streams: int, processes: list[Process], engine: Server, folder: Path
) -> dict[str, list[dict[str, float]]]:
    """Figures of each server, a row per round."""
    texts = prompts(given.data, count_of(given, streams))
    file = requests(folder, texts, given.tokens)
    runs = {one.name: lambda one=one: measured(one, given, streams, file, len(texts)) for one in processes}
    if streams == 1:
        runs["engine"] = lambda: engine_alone(engine, texts, given.tokens, given.cores)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for turn in range(given.rounds + 1):
        shift = turn % len(runs)
        names = list(runs)
        for each in names[shift:] + names[:shift]:
            found = runs[each]()
            print(f"round {turn}  {each:14} {found['tokens_per_s']:8.2f} tokens/s", file=sys.stderr)
            if turn:
                rounds[each].append(found)
    return rounds


def count_of(given: argparse.Namespace, streams: int) -> int:
    """Number of requests per round."""
    return given.requests or max(4, 2 * streams)


def keep(given: argparse.Namespace, streams: int, rounds: dict[str, list[dict[str, float]]]) -> None:
    """Add the results with a number of streams to the file."""
    whole = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {"machine": machine("cpu")}
    own = whole.setdefault("results", {}).setdefault(given.dtype, {})
    own[str(streams)] = {
        "requests": count_of(given, streams),
        "tokens": given.tokens,
        "cores": len(given.cores),
        "load_average": os.getloadavg()[0],
        "servers": result(rounds),
    }
    given.out.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    print(json.dumps(own[str(streams)], indent=1))


if __name__ == "__main__":
    main()

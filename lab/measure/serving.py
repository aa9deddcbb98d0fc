"""Load on servers of OpenAI's API, in turns: requests and tokens per second, first token, gaps.

    python lab/measure/serving.py --data DIR --out FILE --streams 1,8 \
        --server off=http://127.0.0.1:8000,speculation=off --server governed=http://127.0.0.1:8000 \
        --server vllm=http://127.0.0.1:8001

Each server gets the same prompts (GSM8K, HumanEval, turns of Spec-Bench in turn), greedy, without an end.
`pid=N` after an address adds the processor time of that process and its children, which other load on the
machine does not lengthen as it does the clock's. `local:FOLDER,dtype=float32` in place of an address is the
engine in this process, plain and without a server: what is lost to one. The same prompts return in each
round: start the servers with --prefix-cache 0, or vLLM's with --no-enable-prefix-caching.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from outpace.core import SamplingParams
from outpace.loading import load


@dataclass
class Server:
    """A server under load, and what was seen of it per number of streams."""

    name: str
    url: str
    model: str = ""
    pid: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    engine: Any = None
    runs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Server:
        name, _, rest = text.partition("=")
        url, *options = rest.split(",")
        pairs = dict(option.split("=", 1) for option in options)
        pid = int(pairs.pop("pid")) if "pid" in pairs else None
        return cls(name, url, pid=pid, more=pairs)


def prompts(folder: Path, count: int) -> list[str]:
    """Prompts of three kinds in turn."""

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]

    kinds = [
        [f"Question: {one['question']}\nAnswer:" for one in lines("gsm8k_test_200.jsonl")],
        [one["prompt"] for one in lines("humaneval.jsonl")],
        [one["turns"][0][:2000] for one in lines("spec_bench.jsonl")],
    ]
    return [one for several in zip(*kinds, strict=False) for one in several][:count]


def processor(pid: int) -> float:
    """Processor seconds of a process and its children."""
    tick, found = os.sysconf("SC_CLK_TCK"), 0.0
    parents: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        times[int(folder.name)] = (int(fields[11]) + int(fields[12])) / tick
        parents.setdefault(int(fields[1]), []).append(int(folder.name))
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        found += times.get(one, 0.0)
        waiting += parents.get(one, [])
    return found


async def one(http: httpx2.AsyncClient, server: Server, prompt: str, tokens: int) -> dict[str, Any]:
    """One streamed request: its text, and the seconds until each chunk."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}, **server.more}
    began, chunks, text, count = time.perf_counter(), [], "", 0
    async with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{server.name}: {response.status_code} {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("usage"):
                count = chunk["usage"]["completion_tokens"]
            if chunk["choices"] and chunk["choices"][0]["text"]:
                chunks.append(time.perf_counter() - began)
                text += chunk["choices"][0]["text"]
    return {"text": text, "tokens": count, "chunks": chunks, "seconds": time.perf_counter() - began}


async def run(server: Server, texts: list[str], streams: int, tokens: int) -> dict[str, Any]:
    """All prompts, this many at once."""
    waiting = iter(texts)
    done: list[dict[str, Any]] = []
    async with httpx2.AsyncClient(timeout=3600, limits=httpx2.Limits(max_connections=streams)) as http:
        if not server.model:
            server.model = (await http.get(f"{server.url}/v1/models")).json()["data"][0]["id"]

        async def stream() -> None:
            for text in waiting:
                done.append({"prompt": text} | await one(http, server, text, tokens))

        used = processor(server.pid) if server.pid else 0.0
        began = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        seconds = time.perf_counter() - began
        used = processor(server.pid) - used if server.pid else 0.0
    emitted = sum(each["tokens"] for each in done)
    # A step may bring several tokens in one chunk, which share the time since the chunk before.
    gaps = [
        (each["chunks"][-1] - each["chunks"][0]) / max(1, each["tokens"] - 1)
        for each in done
        if each["chunks"]
    ]
    steps = [b - a for each in done for a, b in itertools.pairwise(each["chunks"])]
    return {
        "requests_per_s": len(done) / seconds,
        "tokens_per_s": emitted / seconds,
        "tokens": emitted,
        "processor_s_per_token": used / emitted if server.pid else None,
        "first_token_s": statistics.median(each["chunks"][0] for each in done if each["chunks"]),
        "inter_token_s": statistics.median(gaps),
        "chunk_gap_p50_s": statistics.median(steps),
        "chunk_gap_p99_s": statistics.quantiles(steps, n=100)[98] if len(steps) > 1 else steps[0],
        "texts": {each["prompt"]: each["text"] for each in done},
    }


def alone(server: Server, texts: list[str], streams: int, tokens: int) -> dict[str, Any]:
    """All prompts through an engine in this process, this many at once."""
    if server.engine is None:
        loaded = load(server.url.removeprefix("local:"), server.more["dtype"], "cpu")
        server.engine = loaded.engine("none"), loaded
    engine, loaded = server.engine
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    found: list[Any] = []
    used, began = time.process_time(), time.perf_counter()
    for start in range(0, len(texts), streams):
        found += engine.generate([loaded.tokens(text) for text in texts[start : start + streams]], params)
    used, seconds = time.process_time() - used, time.perf_counter() - began
    emitted = sum(len(each.tokens) for each in found)
    return {
        "requests_per_s": len(found) / seconds,
        "tokens_per_s": emitted / seconds,
        "tokens": emitted,
        "processor_s_per_token": used / emitted,
        "texts": {text: each.text for text, each in zip(texts, found, strict=True)},
    }


async def measured(given: argparse.Namespace, servers: list[Server]) -> None:
    for streams in given.streams:
        texts = prompts(given.data, max(given.requests, streams))
        for round_ in range(-1, given.rounds):
            for server in servers if round_ % 2 else servers[::-1]:
                # The round before the first is not counted: kernels, caches and the governor's costs.
                some = texts if round_ >= 0 else texts[:streams]
                if server.url.startswith("local:"):
                    found = alone(server, some, streams, given.tokens)
                else:
                    found = await run(server, some, streams, given.tokens)
                if round_ >= 0:
                    server.runs.setdefault(streams, []).append(found)
                    print(f"{streams:3} streams  {server.name:12} {found['tokens_per_s']:8.1f} tokens/s")


def table(servers: list[Server], streams: list[int]) -> dict[str, Any]:
    """Medians over rounds, and ratios to the first server of the same round."""
    found: dict[str, Any] = {}
    for count in streams:
        for server in servers:
            runs, base = server.runs[count], servers[0].runs[count]
            row: dict[str, Any] = {}
            for name in runs[0]:
                values = [each[name] for each in runs]
                if name != "texts" and values[0] is not None:
                    row[name] = statistics.median(values)
            row["tokens_per_s_ratio"] = statistics.median(
                a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(runs, base, strict=True)
            )
            if runs[0]["processor_s_per_token"] and base[0]["processor_s_per_token"]:
                row["processor_ratio"] = statistics.median(
                    b["processor_s_per_token"] / a["processor_s_per_token"]
                    for a, b in zip(runs, base, strict=True)
                )
            row["texts_as_first"] = statistics.mean(
                a["texts"][prompt] == b["texts"][prompt]
                for a, b in zip(runs, base, strict=True)
                for prompt in b["texts"]
            )
            found.setdefault(str(count), {})[server.name] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", type=Server.parse, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--streams", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8, 32]
    )
    parser.add_argument("--requests", type=int, default=32, help="per round; at least one for each stream")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    asyncio.run(measured(given, given.server))
    result = {
        "machine": platform.processor() or platform.machine(),
        "load": os.getloadavg(),
        "settings": {"requests": given.requests, "tokens": given.tokens, "rounds": given.rounds},
        "servers": {one.name: one.more for one in given.server},
        "results": table(given.server, given.streams),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result["results"], indent=1))


if __name__ == "__main__":
    main()

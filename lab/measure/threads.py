"""Tokens per second of plain decoding by where the engine runs, and by what else the machine does.

A server with all threads stands beside the library, asked by one client.

    python lab/measure/threads.py FOLDER [--quantise int4] [--threads 1,2] [--busy 0,1,2] [--rounds 3]

Rounds in turns, one engine in the main thread and one in another; medians. Busy programs use a core each.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

import outpace

TOKENS = 32
PROMPT = [list(range(100, 164))]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run programs that use a core each meanwhile."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def speed(engine: outpace.Engine, threads: int) -> float:
    torch.set_num_threads(threads)
    began = time.perf_counter()
    engine.generate(PROMPT, outpace.SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    return TOKENS / (time.perf_counter() - began)


@contextmanager
def server(folder: str, quantise: str | None) -> Iterator[str]:
    """Run `outpace serve` on a free port; its address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--dtype", "bfloat16", "--drafter", "none", "--port", str(port)]
    options += ["--quantise", quantise] if quantise else []
    command = [sys.executable, "-m", "outpace", "serve", "--model", folder, *options]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            if program.poll() is not None:
                raise SystemExit(f"the server ended with status {program.returncode}")
            try:
                urllib.request.urlopen(f"{address}/health/ready", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield address
    finally:
        program.terminate()
        program.wait()


def served(address: str) -> float:
    body = {"prompt": PROMPT[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        count = json.load(answer)["usage"]["completion_tokens"]
    return int(count) / (time.perf_counter() - began)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--quantise", choices=("int8", "int4"))
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--busy", type=numbers, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    loaded = outpace.load(given.folder, "bfloat16", "cpu", quantise=given.quantise)
    with ThreadPoolExecutor(1) as other, server(given.folder, given.quantise) as address:
        here, there = loaded.engine("none"), other.submit(loaded.engine, "none").result()
        ways: dict[str, Callable[[int], float]] = {
            "main thread": partial(speed, here),
            "another thread": lambda threads: other.submit(speed, there, threads).result(),
            "server, all threads": lambda _: served(address),
        }
        for way in ways.values():
            way(given.threads[-1])
        for programs in given.busy:
            found: dict[tuple[str, int], list[float]] = {}
            with busy(programs):
                for _ in range(given.rounds):
                    for name, way in ways.items():
                        for threads in given.threads if way is not ways["server, all threads"] else [0]:
                            found.setdefault((name, threads), []).append(way(threads))
            for (name, threads), each in found.items():
                print(
                    f"{programs} busy, {name}, {threads} threads: {statistics.median(each):.1f}", flush=True
                )


if __name__ == "__main__":
    main()

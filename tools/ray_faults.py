"""Requests to two replicas under Ray Serve while one is killed: every text must equal the engine's alone.

python tools/ray_faults.py 500 32     # needs outpace[ray] and httpx, on Linux
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import ray
from ray import serve

from outpace.core import SamplingParams
from outpace.loading import load
from outpace.serve.ray import Config, build

URL, KEY, TOKENS = "http://127.0.0.1:8123/v1", {"Authorization": "Bearer secret"}, 24
TEXTS = [f"Question: What is {i} + {i + 1}? Answer:" for i in range(20)]


def ask(number: int) -> str:
    """One completion, every other one streamed; RuntimeError where it is not whole."""
    body = {"model": "nano", "prompt": TEXTS[number % 20], "max_tokens": TOKENS, "temperature": 0}
    if number % 2:
        answer = httpx.post(f"{URL}/completions", json=body, headers=KEY, timeout=300)
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}")
        return str(answer.json()["choices"][0]["text"])
    text, whole = "", False
    more = {"json": body | {"stream": True}, "headers": KEY, "timeout": 300}
    with httpx.stream("POST", f"{URL}/completions", **more) as stream:
        if stream.status_code != 200:
            raise RuntimeError(f"status {stream.status_code}")
        for line in stream.iter_lines():
            whole = whole or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"])
                text += "".join(choice["text"] for choice in event["choices"])
    if not whole:
        raise RuntimeError("the stream was cut")
    return text


def replicas() -> list[int]:
    """Process ids."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [p for p in pids if Path(f"/proc/{p}/cmdline").read_text().startswith("ray::ServeReplica")]


def main(requests: int, streams: int) -> int:
    model = load()
    prompts = [model.encode(text) for text in TEXTS]
    alone = model.engine("none").generate(prompts, SamplingParams(max_new_tokens=TOKENS))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": 8123})
    config = Config(
        name="nano", api_keys="secret", min_replicas=2, max_replicas=3, cpus=0.5, target_ongoing=8
    )
    serve.run(build(config))
    if httpx.post(f"{URL}/completions", json={"model": "nano", "prompt": "x"}).status_code != 401:
        raise SystemExit("a request without a key was let in")
    waiting, found, again = list(range(requests)), dict[int, str](), list[str]()

    def work() -> None:
        while waiting:
            try:
                number = waiting.pop()
            except IndexError:  # another stream took the last
                return
            while number not in found:
                try:
                    found[number] = ask(number)
                except (RuntimeError, httpx.HTTPError) as error:
                    again.append(repr(error))
                    time.sleep(0.5)

    threads = [threading.Thread(target=work) for _ in range(streams)]
    for thread in threads:
        thread.start()
    while len(found) < requests // 3:
        time.sleep(0.1)
    os.kill(replicas()[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    equal = sum(text == alone[number % 20].text for number, text in found.items())
    print(f"{len(found)} of {requests} answered, {equal} equal, {len(again)} asked again")
    serve.shutdown()
    return 0 if equal == requests else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

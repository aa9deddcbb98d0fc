"""kill -9 of a server process, and its restart: responses that clients have are complete."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from serving import model

SHORT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.8, "seed": 3}


@contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], str, float]]:
    """A server in a process: it, its address, and the seconds that its start took by its own account."""
    command = [
        sys.executable,
        "-m",
        "outpace",
        "serve",
        "--port",
        "0",
        "--dtype",
        "float64",
        "--memory",
        "0.2",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if ready := re.search(r"ready after ([\d.]+) s", said):
                address = re.search(r"API +(http://\S+)/v1", said)
                assert address is not None
                yield process, address[1], float(ready[1])
                return
        raise AssertionError(said)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_nothing_that_was_acknowledged_as_complete_is_lost() -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.8, seed=3)
    engine = Engine(model().target, tokenizer=model().tokenizer)
    expected = engine.generate([model().tokens(SHORT["prompt"])], params)[0].text
    for _ in range(2):  # a server that was killed leaves nothing that its successor trips over
        with served() as (process, address, seconds), httpx2.Client(base_url=address, timeout=60) as http:
            assert seconds > 0
            whole = http.post("/v1/completions", json=SHORT).json()
            assert whole["choices"][0]["text"] == expected
            long = {**SHORT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=long) as response:
                lines = response.iter_lines()
                text = json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
                process.send_signal(signal.SIGKILL)
                with pytest.raises(httpx2.RemoteProtocolError):  # cut off, which no client takes for its end
                    for line in lines:
                        assert "[DONE]" not in line
            assert text and expected is not None and expected.startswith(text)
            assert process.wait() == -signal.SIGKILL

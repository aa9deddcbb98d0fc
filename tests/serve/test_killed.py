"""kill -9 of a server process, and its restart: responses that clients have are complete."""

from __future__ import annotations

import json
import signal

import httpx2
import pytest

from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from serving import model, served

SHORT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.8, "seed": 3}


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

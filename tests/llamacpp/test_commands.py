"""GGUF files in a chat, in the server and on the command line, and what llama.cpp writes and reserves."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

import outpace
from gguf_files import gguf_file
from outpace.cli.chat import Chat
from outpace.cli.interrupt import Interrupt
from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import Target
from serving import run, serving

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPT = "Question: What is 2 + 3?\nAnswer:"


@pytest.fixture(scope="module")
def loaded() -> Any:
    return outpace.load(str(gguf_file("q8_0")), llamacpp="threads=1")


def test_a_chat_of_two_turns_is_that_of_plain_decoding(loaded: Any) -> None:
    said: dict[str | None, list[dict[str, str]]] = {}
    for drafter in (None, "suffix"):
        chat = Chat(loaded, Engine(loaded.target, drafter, tokenizer=loaded.tokenizer), PARAMS)
        for message in ("What is 2 + 3?", "And 3 + 4?"):
            chat.ask(message, lambda piece: None, Interrupt(), lambda notice: None)
        said[drafter] = chat.messages
    assert said[None] == said["suffix"] and len(said[None]) == 4


def test_the_server_answers_as_the_engine_does(loaded: Any) -> None:
    expected = [Engine(loaded.target).generate([loaded.tokens(PROMPT * n)], PARAMS)[0].tokens for n in (1, 2)]

    async def main() -> None:
        async with serving("suffix", loaded=loaded) as client:
            asked = [client.complete(PROMPT * n, max_tokens=24, ignore_eos=True) for n in (1, 2)]
            texts = [(await one.json())["choices"][0]["text"] for one in asked]
            assert texts == [loaded.tokenizer.decode(one, skip_special_tokens=True) for one in expected]
            answer = await client.chat(max_tokens=4).json()
            assert answer["choices"][0]["message"]["role"] == "assistant"
            await client.empty()

    run(main)


def test_the_library_writes_into_the_log_alone(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "outpace.llamacpp"):
        Engine(Target(gguf_file("q8_0"), check=False)).generate([[5, 6, 7]], PARAMS)
    assert any("n_ctx" in record.message for record in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_rows_that_exceed_the_memory_are_refused(loaded: Any) -> None:
    with pytest.raises(OutpaceError, match=r"GB for keys and values, and .* GB are free; give"):
        Engine(loaded.target, length=10**9)
    assert Engine(loaded.target).generate([[5, 6, 7]], PARAMS)[0].tokens


def test_ctrl_c_ends_a_command_in_one_line() -> None:
    asked = ["generate", "--model", str(gguf_file("q8_0")), "--drafter", "suffix", "--prompt", PROMPT]
    command = [sys.executable, "-m", "outpace", *asked, "--max-new-tokens", "1900", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    late = threading.Timer(120, process.kill)
    late.start()
    try:
        assert process.stdout.read(1)  # it decodes
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    finally:
        late.cancel()
        process.kill()
    assert process.returncode == 130
    assert error.decode().strip().splitlines()[-1] == "interrupted" and b"Traceback" not in error

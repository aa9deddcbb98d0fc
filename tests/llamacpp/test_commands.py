"""GGUF files in a chat, in the server and on the command line, and what llama.cpp writes and reserves."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

import outpace
from gguf_files import gguf_file
from outpace.cli import app
from outpace.cli.chat import ChatSession
from outpace.cli.interrupt import Interrupt
from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import Target
from outpace.targets.llamacpp.library import LlamaContext, library, log
from serving import FORM, PERSON, run, serving

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPT = "Question: What is 2 + 3?\nAnswer:"


@pytest.fixture(scope="module")
def loaded() -> Any:
    return outpace.load(str(gguf_file("q8_0")), llamacpp="threads=1")


def test_a_chat_of_two_turns_is_that_of_plain_decoding(loaded: Any) -> None:
    said: dict[str | None, list[dict[str, str]]] = {}
    for drafter in (None, "suffix"):
        chat = ChatSession(
            loaded,
            Engine(loaded.target, drafter, tokenizer=loaded.tokenizer),
            {"max_new_tokens": 24, "ignore_eos": True},
        )
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
    path = gguf_file("q8_0")
    capfd.readouterr()  # writing the file may have been told
    with caplog.at_level(logging.DEBUG, "outpace.llamacpp"):
        Engine(Target(path, check=False, threads=1)).generate([[5, 6, 7]], PARAMS)
    assert any("n_ctx" in record.message for record in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_rows_that_exceed_the_memory_are_refused(loaded: Any) -> None:
    with pytest.raises(OutpaceError, match=r"GB for keys and values, and .* GB are free; give"):
        Engine(loaded.target, length=10**9)
    assert Engine(loaded.target).generate([[5, 6, 7]], PARAMS)[0].tokens


def test_an_interrupted_decode_leaves_the_process_clean(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A signal while llama.cpp decodes is raised once it returns, and decoding works afterwards."""
    expected = Engine(loaded.target).generate([loaded.tokens(PROMPT)], PARAMS)[0].tokens
    engine, decodes = Engine(loaded.target, "suffix"), threading.Semaphore(0)
    decode = LlamaContext.decode

    def told(self: LlamaContext, *given: Any, **more: Any) -> Any:
        decodes.release()
        return decode(self, *given, **more)

    monkeypatch.setattr(LlamaContext, "decode", told)

    def interrupt() -> None:
        for _ in range(5):
            decodes.acquire()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([loaded.tokens(PROMPT)], SamplingParams(max_new_tokens=1900, ignore_eos=True))
    thread.join()
    assert not engine.sequences and len(engine._batch.cache) == 0
    for again in (engine, Engine(loaded.target, "suffix")):
        assert again.generate([loaded.tokens(PROMPT)], PARAMS)[0].tokens == expected
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("place", ["loading the model", "making a context"])
def test_an_interrupt_while_the_library_writes_is_not_lost(loaded: Any, place: str) -> None:
    class Interrupting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logger.removeHandler(self)  # once
            os.kill(os.getpid(), signal.SIGINT)

    logger, path = logging.getLogger("outpace.llamacpp"), gguf_file("q8_0")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Interrupting())
    try:
        with pytest.raises(KeyboardInterrupt):
            Target(path, threads=1) if place == "loading the model" else Engine(loaded.target).generate(
                [[5]], PARAMS
            )
    finally:
        logger.setLevel(level)
    assert Engine(Target(path, threads=1)).generate([[5, 6, 7]], PARAMS)[0].tokens


def test_an_interrupt_while_a_decode_writes_ends_that_decode(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, written = Engine(loaded.target), log()

    def interrupted(level: int, text: bytes) -> None:
        raise KeyboardInterrupt

    decode, decodes = library().llama_decode, 0

    def writing(*given: Any) -> Any:
        nonlocal decodes
        decodes += 1
        if decodes == 2:
            with monkeypatch.context() as inside:
                inside.setattr(written, "_write", interrupted)
                written(2, b"a line", None)
        return decode(*given)

    with monkeypatch.context() as outside, pytest.raises(KeyboardInterrupt):
        outside.setattr(library(), "llama_decode", writing)
        engine.generate([[5, 6, 7]], PARAMS)
    assert decodes == 2 and not engine.sequences
    assert engine.generate([[5, 6, 7]], PARAMS)[0].tokens


def test_a_schema_is_obeyed_and_drafts_change_no_token(loaded: Any) -> None:
    async def main() -> None:
        async with serving("suffix", loaded=loaded) as client:
            asked = {"response_format": FORM, "max_tokens": 80, "temperature": 0.8, "seed": 1}
            found = [await client.chat(**asked, **more).json() for more in ({}, {"speculation": "off"})]
            assert found[0]["choices"] == found[1]["choices"]
            assert set(json.loads(found[0]["choices"][0]["message"]["content"])) == set(PERSON["properties"])

    run(main)


def command(*asked: Any, entered: str | None = None) -> Any:
    found = CliRunner().invoke(app, list(map(str, asked)), input=entered)
    assert found.exit_code == 0, found.output
    return found


def test_the_benchmark_measures_a_file(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "say 1, say 1"}))
    asked = ("--drafters", "none,suffix", "--suite", f"file:{prompts}", "--max-new-tokens", 16, "--json", "-")
    found = json.loads(command("bench", "--model", gguf_file("q8_0"), *asked).stdout)
    rows = {row["drafter"]: row for row in found["rows"]}
    assert set(rows) == {"none", "suffix"} and rows["suffix"]["equal"]
    assert found["model"]["bits"] == "bit-exact"


def test_a_chat_on_the_command_line() -> None:
    asked = ("chat", "--model", gguf_file("q8_0"), "--drafter", "suffix", "--max-new-tokens", 8)
    found = command(*asked, entered="What is 2 + 3?\n/exit\n")
    plain = command(*asked[:4], "none", *asked[5:], entered="What is 2 + 3?\n/exit\n")
    assert found.stdout.strip() and found.stdout == plain.stdout
    assert "tokens per step" in found.stderr


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

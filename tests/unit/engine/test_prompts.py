"""Texts, conversations and token ids as prompts of an engine and of a loaded model; several outputs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from folders import save_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.engine.aio import AsyncEngine
from outpace.engine.engine import Engine
from outpace.loading import Loaded, load

SHORT = SamplingParams(max_tokens=6)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "x"},
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(save_llama(tmp_path_factory.mktemp("models") / "chat", chat=True), dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model without a chat template."""
    return load(save_llama(tmp_path_factory.mktemp("models") / "bare"), dtype=torch.float32, device="cpu")


def ids(loaded: Loaded, text: str) -> list[int]:
    found: list[int] = loaded.tokenizer(text).input_ids
    return found


def test_an_engine_reads_texts_and_conversations(loaded: Loaded) -> None:
    engine = loaded.engine("prompt_lookup")
    prompts = [ids(loaded, "abcabc"), loaded.encode_chat(TALK)]
    assert prompts[1] == ids(loaded, "[user]hi[assistant]ho[user]x[assistant]")
    wanted = [one.tokens for one in engine.generate(prompts, SHORT)]
    assert wanted[0] != wanted[1]
    assert [one.tokens for one in engine.generate(["abcabc", TALK], SHORT)] == wanted
    assert [one.tokens for one in engine.generate("abcabc", SHORT)] == wanted[:1]
    assert [one.tokens for one in engine.generate(TALK, SHORT)] == wanted[1:]
    for prompt, expected in zip(("abcabc", TALK), wanted, strict=True):
        assert [one.token for one in engine.stream(prompt, SHORT)] == expected
    assert engine.generate([], SHORT) == []

    async def run() -> list[int]:
        async with AsyncEngine(lambda: loaded.engine("prompt_lookup")) as served:
            return (await served.generate(TALK, SHORT)).tokens

    assert asyncio.run(run()) == wanted[1]


def test_several_outputs_have_the_seeds_that_follow(loaded: Loaded) -> None:
    engine, prompts = loaded.engine(), ["ab", "cd"]
    asked = [SamplingParams(max_tokens=6, temperature=1.0, seed=2**64 - 1, n=2), SHORT]
    found = engine.generate(prompts, asked)
    assert [one.seed for one in found[:2]] == [2**64 - 1, 0] and len(found) == 3
    for seed, one in zip((2**64 - 1, 0), found, strict=False):
        alone = SamplingParams(max_new_tokens=6, temperature=1.0, seed=seed)
        assert engine.generate(["ab"], alone)[0].tokens == one.tokens
    assert found[2].tokens == engine.generate(["cd"], SHORT)[0].tokens
    free = engine.generate("ab", SamplingParams(max_tokens=1, n=3))
    assert len({one.seed for one in free}) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: Engine(engine.target).generate(["text"]), "the engine needs a tokenizer"),
        (lambda engine: engine.generate([{"content": "x"}]), "a message is a dict with its role"),
        (lambda engine: engine.stream("x", SamplingParams(n=2)), "n=2 is for generate"),
        (lambda engine: engine.add("x", SamplingParams(n=2)), "n=2 is for generate"),
        (
            lambda engine: SamplingParams(max_tokens=3, max_new_tokens=4),
            "max_tokens or max_new_tokens, not both",
        ),
        (lambda engine: SamplingParams(n=0), "n must be at least 1"),
        (lambda engine: load("no/such/folder/here"), "no such folder"),
        (lambda engine: load(quantize="int8"), "no argument 'quantize'. Did you mean 'quantise'?"),
        (lambda engine: load(3), "takes a name or a folder, not a int"),
    ],
)
def test_mistakes_are_told(loaded: Loaded, call: Any, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        call(loaded.engine())


def test_one_name_for_a_limit_replaces_the_other() -> None:
    params = SamplingParams(max_tokens=7)
    assert params.max_new_tokens == 7 and params == SamplingParams(max_new_tokens=7)
    assert params.output(1).max_new_tokens == 7


def test_a_loaded_model_generates_streams_and_chats(loaded: Loaded) -> None:
    engine = loaded.engine()
    raw, turn = engine.generate(["abcabc", [{"role": "user", "content": "abcabc"}]], SHORT)
    assert raw.tokens != turn.tokens
    assert loaded.generate("abcabc", max_tokens=6)[0].tokens == turn.tokens
    assert loaded.generate(["abcabc"], SHORT, raw=True)[0].tokens == raw.tokens
    assert [one.token for one in loaded.stream("abcabc", SHORT)] == turn.tokens
    assert loaded.chat("abcabc", max_tokens=6).tokens == turn.tokens
    assert loaded.chat(TALK, SHORT).tokens == engine.generate(TALK, SHORT)[0].tokens
    assert len(loaded.generate(["a", "b"], n=2, max_tokens=1)) == 4


def test_a_model_without_a_template_takes_texts_as_they_stand(bare: Loaded) -> None:
    expected = bare.engine().generate([ids(bare, "abcabc")], SHORT)
    assert bare.generate("abcabc", SHORT)[0].tokens == expected[0].tokens
    with pytest.raises(OutpaceError, match="has no chat template"):
        bare.chat("abcabc")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_token": 3}, "no argument 'max_token'. Did you mean 'max_tokens'?"),
        ({"n": 2}, "chat\\(\\) returns one answer"),
        ({"params": SHORT, "max_tokens": 3}, "give params or max_tokens, not both"),
    ],
)
def test_mistakes_in_a_chat_are_told(loaded: Loaded, more: dict[str, Any], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        loaded.chat("x", **more)


def test_a_chat_samples_as_the_model_says(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "own", chat=True)
    (folder / "generation_config.json").write_text('{"top_k": 3, "do_sample": true}', "utf-8")
    loaded = load(folder, device="cpu")
    asked = {"max_tokens": 8, "seed": 5}
    wanted = loaded.generate("x", SamplingParams(temperature=1.0, top_k=3, **asked))[0].tokens
    assert loaded.chat("x", **asked).tokens == wanted
    greedy = loaded.generate("x", max_tokens=8)[0].tokens
    assert loaded.chat("x", temperature=0, **asked).tokens == greedy != wanted

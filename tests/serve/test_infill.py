"""Filling in the middle: the prompt that each family was trained with, and texts that never become marks."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.loading import Loaded
from outpace.reading import marks_of, unmarked_ids
from outpace.serve.fim import Middle
from serving import model, run, serving
from tokenizers_of import byte_level, sentencepiece_like

QWEN = ("<|end|>", *(f"<|{name}|>" for name in ("fim_prefix", "fim_suffix", "fim_middle", "fim_pad")))
FILES = ("<|repo_name|>", "<|file_sep|>")
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "qwen": ((*QWEN, *FILES), "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"),
    "gemma": ((*QWEN, "<|file_separator|>"), "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"),
    "starcoder": (
        ("<|end|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
        "<fim_prefix>P<fim_suffix>S<fim_middle>",
    ),
    "codellama": (
        ("<|end|>", "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
        "\u2581<PRE>P\u2581<SUF>S\u2581<MID>",
    ),
    "deepseek": (
        ("<|end|>", *(f"<\uff5cfim\u2581{part}\uff5c>" for part in ("begin", "hole", "end"))),
        "<\uff5cfim\u2581begin\uff5c>P<\uff5cfim\u2581hole\uff5c>S<\uff5cfim\u2581end\uff5c>",
    ),
    "codestral": (("<|end|>", "[SUFFIX]", "[PREFIX]"), "[SUFFIX]S[PREFIX]P"),
}
BEFORE, BEHIND = "The miller walked down", " to the river."


def loaded(marks: tuple[str, ...]) -> Loaded:
    return replace(model(), tokenizer=byte_level(400, marks))


def expected(family: str) -> list[int]:
    """The prompt of a family, from its format as a text."""
    marks, text = FAMILIES[family]
    tokenizer, ids = byte_level(400, marks), list[int]()
    plain = {part: tokenizer(said).input_ids for part, said in (("P", BEFORE), ("S", BEHIND))}
    while text:
        mark = next((mark for mark in marks if text.startswith(mark)), "")
        ids += [tokenizer.convert_tokens_to_ids(mark)] if mark else plain[text[0]]
        text = text[len(mark) or 1 :]
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_of_each_family(family: str) -> None:
    tokenizer = byte_level(400, FAMILIES[family][0])
    middle = Middle.of(tokenizer, [])
    assert middle is not None

    async def read(text: str, begins: bool) -> list[int]:
        return unmarked_ids(tokenizer, text, middle.marks, begins)

    assert asyncio.run(middle.prompt(read, BEFORE, BEHIND)) == expected(family)


@pytest.mark.parametrize("family", ["qwen", "codestral"])
def test_both_paths_answer_with_plain_decodings_tokens(family: str) -> None:
    marks, ids = FAMILIES[family][0], expected(family)
    tokenizer = byte_level(400, marks)
    middle = Middle.of(tokenizer, [])
    assert middle is not None
    params = SamplingParams(max_new_tokens=12, stop_token_ids=middle.ends)
    (whole,) = Engine(model().target, tokenizer=tokenizer).generate([ids], params)

    async def main() -> None:
        async with serving("suffix", loaded=loaded(marks)) as client:
            for how in ({}, {"speculation": "off"}):
                asked = {"suffix": BEHIND, "max_tokens": 12, "return_token_ids": True, **how}
                (choice,) = (await client.complete(BEFORE, **asked).json())["choices"]
                assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, whole.tokens)
            body = {"input_prefix": BEFORE[:9], "prompt": BEFORE[9:], "input_suffix": BEHIND}
            body |= {"n_predict": 12, "temperature": 0}
            found = await client.send("/infill", body).json()
            assert (found["content"], found["tokens_evaluated"]) == (whole.text, len(ids))
            events = await client.send("/infill", {**body, "stream": True}).events()
            assert "".join(event["content"] for event in events) == whole.text
            assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]

    run(main)


def test_further_files_are_shown_as_a_repository_or_as_snippets() -> None:
    async def read(text: str, begins: bool) -> list[int]:
        return [ord(one) for one in text]

    async def main(marks: tuple[str, ...]) -> str:
        tokenizer = byte_level(400, marks)
        middle = Middle.of(tokenizer, [])
        assert middle is not None
        shift = 10**6
        moved = replace(middle, ids={mark: token + shift for mark, token in middle.ids.items()})
        names = {token: mark for mark, token in moved.ids.items()}
        ids = await moved.prompt(read, "P", "S", [("a.py", "A"), ("b.py", "B")])
        return "".join(names[token] if token in names else chr(token) for token in ids)

    fim = "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"
    shown = asyncio.run(main((*QWEN, *FILES)))
    assert shown == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nA<|file_sep|>b.py\nB<|file_sep|>filename\n" + fim
    )
    assert asyncio.run(main(QWEN)) == "\n\n--- snippet ---\n\nA\n\n--- snippet ---\n\nB" + fim


def test_a_text_that_begins_every_text_begins_the_prompt() -> None:
    marks = FAMILIES["qwen"][0]
    tokenizer = byte_level(400, marks)
    with_bos = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<|end|>")
    for begin, expected in (([0], (0,)), ([], ()), ([7], ())):
        middle = Middle.of(with_bos, begin)
        assert middle is not None and middle.begin == expected


# -- marks ---------------------------------------------------------------------------------------------


def _added(special: bool) -> PreTrainedTokenizerFast:
    """A tokenizer whose marks are added tokens, special or not."""
    tokenizer = Tokenizer.from_str(byte_level(400, ("<|end|>",)).backend_tokenizer.to_str())
    added = [AddedToken(mark, special=special, normalized=not special) for mark in (*QWEN[1:], "[SUFFIX]")]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.mark.parametrize("special", [False, True])
def test_no_text_becomes_a_mark(special: bool) -> None:
    tokenizer = _added(special)
    marks = marks_of(tokenizer)
    assert {*QWEN, "[SUFFIX]"} <= marks.keys()
    pieces = ("<|fim_prefix|>", "<|fim", "_middle|>", "[SUFFIX]", "<", "a ", "\n", "<|end|>")
    for parts in itertools.product(pieces, repeat=4):
        text = "".join(parts)
        ids = unmarked_ids(tokenizer, text, marks)
        assert not set(ids) & set(marks.values()) and tokenizer.decode(ids) == text
    story = "The miller walked down to the river."
    assert unmarked_ids(tokenizer, story, marks) == tokenizer(story).input_ids
    assert unmarked_ids(tokenizer, "", marks) == []


def test_no_space_is_put_within_a_text() -> None:
    """sentencepiece's tokenizers put a space before a text, and so before what is behind a mark."""
    own = Tokenizer.from_str(sentencepiece_like(120).backend_tokenizer.to_str())
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>", unk_token="<unk>")
    marks = marks_of(tokenizer)

    def spelt(text: str, begins: bool) -> str:
        return "".join(tokenizer.convert_ids_to_tokens(unmarked_ids(tokenizer, text, marks, begins)))

    assert (
        spelt("the wheel", True) == "\u2581the\u2581wheel" and spelt("the wheel", False) == "the\u2581wheel"
    )


def test_what_a_client_sends_is_text_in_every_part() -> None:
    marks = FAMILIES["qwen"][0]
    tokenizer = byte_level(400, marks)
    ids = set(tokenizer.convert_tokens_to_ids(list(marks)))

    async def main() -> None:
        async with serving(loaded=loaded(marks)) as client:
            text = "".join(marks)
            for size in (1, 2**11):  # the longer ones are read by a worker
                asked = {"suffix": text * size, "return_token_ids": True, "max_tokens": 1}
                exchange = client.complete(text, **asked)
                found = await exchange.json()
                if exchange.status == 400:
                    assert "maximum context length" in found["error"]["message"] and size > 1
                    continue
                prompt = found["choices"][0]["prompt_token_ids"]
                wanted = [
                    tokenizer.convert_tokens_to_ids(f"<|fim_{one}|>")
                    for one in ("prefix", "suffix", "middle")
                ]
                assert [token for token in prompt if token in ids] == wanted

    run(main)


# -- ends and refusals -----------------------------------------------------------------------------------


def test_a_mark_ends_the_answer_and_is_not_in_its_text() -> None:
    marks = FAMILIES["qwen"][0]
    pad = byte_level(400, marks).convert_tokens_to_ids("<|fim_pad|>")

    async def main() -> None:
        async with serving(loaded=loaded(marks)) as client:
            asked: dict[str, Any] = {"suffix": BEHIND, "max_tokens": 9, "logit_bias": {str(pad): 100}}
            (choice,) = (await client.complete(BEFORE, **asked).json())["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("", "stop")
            (choice,) = (await client.complete(BEFORE, **asked, ignore_eos=True).json())["choices"]
            assert choice["finish_reason"] == "length"
            body = {"input_prefix": BEFORE, "input_suffix": BEHIND, "n_predict": 24, "temperature": 0}
            whole = (await client.send("/infill", body).json())["content"]
            word = whole[5:7]
            found = await client.send("/infill", {**body, "stop": [word]}).json()
            assert (found["stop_type"], found["stopping_word"]) == ("word", word)
            assert found["content"] == whole[: whole.index(word)]

    run(main)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "has no marks for filling in the middle"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "has no marks for filling in the middle"),
        ("/infill", {"input_prefix": "a"}, "input_suffix: Field required"),
        *(
            ("/infill", {"input_prefix": "a", "input_suffix": "b", name: 1}, f"{name}: this field of llama")
            for name in ("samplers", "t_max_prompt_ms", "t_max_predict_ms", "n_indent", "response_fields")
        ),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}, "input_extra.0.text"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo is not done with a suffix"),
    ],
)
def test_refusals(path: str, body: dict[str, Any], said: str) -> None:
    async def main() -> None:
        async with serving() as client:
            exchange = client.send(path, body)
            assert said in (await exchange.json())["error"]["message"] and exchange.status == 400

    run(main)

"""Chat: that texts are the engine's, whole and in chunks."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from serving import STORY, engine_text, model, run, serving, story

USAGE = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}


def test_chat_is_the_engines_text_in_one_piece_and_in_chunks() -> None:
    async def main() -> None:
        tokens, text = engine_text(story(), max_new_tokens=40, ignore_eos=True)
        async with serving() as client:
            found = await client.chat(max_tokens=40, ignore_eos=True, return_token_ids=True).json()
            assert found["object"] == "chat.completion" and found["model"] == "nano"
            (choice,) = found["choices"]
            assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
            assert choice["token_ids"] == tokens and found["prompt_token_ids"] == story()
            assert choice["finish_reason"] == "length" and choice["logprobs"] is None
            assert set(found["usage"]) == USAGE and found["usage"]["completion_tokens"] == len(tokens)
            options = {"include_usage": True}
            *chunks, usage, done = await client.chat(
                max_tokens=40, ignore_eos=True, stream=True, stream_options=options
            ).events()
            assert done == "[DONE]"
            assert usage["choices"] == [] and usage["usage"] == found["usage"]
            first, *rest, last = [chunk["choices"][0] for chunk in chunks]
            assert first["delta"]["role"] == "assistant" and first["finish_reason"] is None
            assert "".join(choice["delta"]["content"] for choice in rest) == text
            assert last["delta"] == {} and last["finish_reason"] == "length"
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
            assert len({chunk["id"] for chunk in chunks}) == 1
            assert all(chunk["usage"] is None for chunk in chunks)

    run(main)


def test_each_of_n_choices_has_its_own_seed() -> None:
    async def main() -> None:
        expected = [
            engine_text(story(), max_new_tokens=12, temperature=0.8, seed=seed % 2**64, top_k=20)[1]
            for seed in (-1, 0, 1)
        ]
        assert len(set(expected)) == 3
        async with serving() as client:
            found = await client.chat(n=3, seed=-1, temperature=0.8, top_k=20, max_tokens=12).json()
            assert [choice["message"]["content"] for choice in found["choices"]] == expected
            assert found["usage"]["prompt_tokens"] == len(story())

    run(main)


PARAMETERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"logit_bias": {"300": 50}}, {"logit_bias": {300: 50.0}}),
    ({"temperature": 1.3, "seed": 3, "top_p": 0.6}, {"temperature": 1.3, "seed": 3, "top_p": 0.6}),
    ({"temperature": 1.3, "seed": 3, "min_p": 0.2}, {"temperature": 1.3, "seed": 3, "min_p": 0.2}),
    ({"seed": 5, "temperature": None}, {"seed": 5, "temperature": 1.0}),
    ({"stop": "the"}, {"stop": "the"}),
    ({"temperature": 1.3, "seed": 3.0, "top_p": 0}, {}),
    ({"stop_token_ids": [16]}, {"stop_token_ids": [16]}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
]


def test_parameters_reach_the_engine() -> None:
    """All in one batch, each with the tokens of plain decoding alone."""

    async def main() -> None:
        async with serving() as client:
            shared = {"max_completion_tokens": 24, "return_token_ids": True}
            sent = [client.chat(**shared, **fields) for fields, _ in PARAMETERS]
            for exchange, (fields, params) in zip(sent, PARAMETERS, strict=True):
                (found,) = (await exchange.json())["choices"]
                answer = found["token_ids"], found["message"]["content"]
                assert answer == engine_text(story(), max_new_tokens=24, **params), fields

    run(main)


def test_min_tokens_holds_back_the_end() -> None:
    async def main() -> None:
        async with serving() as client:
            ends = {"logit_bias": {"0": 100}}
            found = await client.chat(max_tokens=9, return_token_ids=True, **ends).json()
            assert found["choices"][0]["token_ids"] == [0]
            assert found["choices"][0]["finish_reason"] == "stop"
            found = await client.chat(max_tokens=9, min_tokens=4, return_token_ids=True, **ends).json()
            assert len(found["choices"][0]["token_ids"]) == 5

    run(main)


def test_a_character_of_several_tokens_is_never_broken() -> None:
    async def main() -> None:
        wanted = model().plain_tokens("é😀")
        assert len(wanted) > 2
        async with serving() as client:
            bias = {str(token): 60 for token in wanted}
            *chunks, _ = await client.chat(
                max_tokens=20, temperature=2, seed=1, logit_bias=bias, stream=True
            ).events()
            pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
            whole = await client.chat(max_tokens=20, temperature=2, seed=1, logit_bias=bias).json()
            text = whole["choices"][0]["message"]["content"]
            assert "".join(pieces) == text
            assert (
                "\N{REPLACEMENT CHARACTER}" in text or text
            )  # halves that never become whole are shown last
            head = "".join(pieces[:-2])
            assert text.startswith(head)

    run(main)


def test_predicted_outputs_are_copied() -> None:
    async def main() -> None:
        _, text = engine_text(story(), max_new_tokens=40, ignore_eos=True)
        async with serving() as client:
            asked = {"max_tokens": 40, "ignore_eos": True, "speculation_metrics": True, "speculation": True}
            plain = await client.chat(**asked).json()
            assert "completion_tokens_details" not in plain["usage"]
            prediction = {"type": "content", "content": text}
            found = await client.chat(prediction=prediction, **asked).json()
            assert found["choices"] == plain["choices"]
            assert found["speculation"]["drafter"] == "request"
            details = found["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 25
            steps = found["metrics"]["speculative_decoding"]["num_spec_steps"]
            assert steps < plain["metrics"]["speculative_decoding"]["num_spec_steps"]
            wrong = await client.chat(prediction={"type": "content", "content": "no no no"}, **asked).json()
            assert wrong["choices"] == plain["choices"]
            assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0
            sampled = {"n": 2, "temperature": 0.7, "seed": 4, "logprobs": True, "max_tokens": 20}
            with_prediction = await client.chat(prediction=prediction, **sampled).json()
            assert with_prediction["choices"] == (await client.chat(**sampled).json())["choices"]

    run(main)


def test_a_refusal_of_the_assistant_is_its_text() -> None:
    async def main() -> None:
        text = {"role": "assistant", "content": "No."}
        refusal = {"role": "assistant", "content": None, "refusal": "No."}
        async with serving() as client:
            found = [
                (await client.send("/tokenize", {"messages": [*STORY, said, *STORY]}).json())["tokens"]
                for said in (text, refusal)
            ]
            assert found[0] == found[1]

    run(main)


@pytest.mark.parametrize("trims", [False, True])
def test_a_last_message_of_the_assistant_is_continued(trims: bool) -> None:
    """Whatever the template does with a text's end, the prompt ends as the client's text does."""
    tokenizer = copy.deepcopy(model().tokenizer)
    if trims:
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
    loaded = replace(model(), tokenizer=tokenizer)
    engine = Engine(model().target, tokenizer=model().tokenizer)

    async def main() -> None:
        async with serving(loaded=loaded) as client:
            for begun in ("Once upon a", "", "Once upon a ", "Once\n"):
                rendered = loaded.render([*STORY, {"role": "assistant", "content": f"{begun}@"}])
                head = rendered[: rendered.index("@")] if begun else loaded.render(STORY)
                ids = loaded.plain_tokens(head)
                (whole,) = engine.generate([ids], SamplingParams(max_new_tokens=8))
                said = {"role": "assistant", "content": begun}
                for more in ({"prefix": True}, {"partial": True}, {}):
                    asked: dict[str, Any] = {"messages": [*STORY, {**said, **more}], "max_tokens": 8}
                    if not more:
                        asked |= {"continue_final_message": True, "add_generation_prompt": False}
                    for how in ({}, {"speculation": "off"}, {"stream": True})[: None if more else 1]:
                        exchange = client.chat(**asked, **how, return_token_ids=True)
                        if how.get("stream"):
                            *chunks, _ = await exchange.events()
                            first, tokens = (
                                chunks[0],
                                chain(*(c["choices"][0].get("token_ids", ()) for c in chunks)),
                            )
                            assert (first["prompt_token_ids"], list(tokens)) == (ids, whole.tokens)
                            continue
                        found = await exchange.json()
                        assert found["prompt_token_ids"] == ids, (begun, found)
                        assert found["choices"][0]["message"]["content"] == whole.text
                    counted = {name: one for name, one in asked.items() if name != "max_tokens"}
                    assert (await client.send("/tokenize", counted).json())["tokens"] == ids
                if begun[-1:].isspace():
                    continue  # which Anthropic refuses
                asked = {"messages": [*STORY, said], "max_tokens": 8, "temperature": 0}
                found = await client.send("/v1/messages", asked).json()
                assert found["content"][0]["text"] == whole.text
                assert found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"] == len(ids)
                counted = await client.send("/v1/messages/count_tokens", {"messages": [*STORY, said]}).json()
                assert counted == {"input_tokens": len(ids)}

    run(main)


def test_a_prompt_may_end_with_its_last_message() -> None:
    async def main() -> None:
        async with serving() as client:
            asked = {"max_tokens": 1, "add_generation_prompt": False, "return_token_ids": True}
            found = await client.chat(**asked).json()
            assert found["prompt_token_ids"] == model().encode_chat(STORY, add_generation_prompt=False)

    run(main)

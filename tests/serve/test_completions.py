"""OpenAI's completions: prompts of every form, log probabilities, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serving import engine_text, model, run, serving, story

TEXT = "/v1/completions"


@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_take_texts_and_ids_and_several(as_ids: bool) -> None:
    async def main() -> None:
        texts = ["The quick brown", "Once upon a time"]
        ids = [model().tokens(text) for text in texts]
        expected = [engine_text(prompt, max_new_tokens=16)[1] for prompt in ids]
        async with serving() as client:
            found = await client.complete(ids if as_ids else texts).json()
            assert [choice["text"] for choice in found["choices"]] == expected
            assert [choice["index"] for choice in found["choices"]] == [0, 1]
            found = await client.complete(ids[0] if as_ids else texts[0], echo=True).json()
            assert found["choices"][0]["text"] == texts[0] + expected[0]
            *chunks, _ = await client.complete(ids if as_ids else texts, stream=True).events()
            pieces = ["", ""]
            for chunk in chunks:
                pieces[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            assert pieces == expected
            assert [c["choices"][0]["finish_reason"] for c in chunks].count(None) == len(chunks) - 2

    run(main)


def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engine.engine._SCORED", 3)
    ids = story()
    logits = model().target.model(torch.tensor([ids])).logits[0, :-1]
    rows = logits.float().log_softmax(dim=-1)
    expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    async def main() -> None:
        async with serving() as client:
            asked = {"max_tokens": 4, "logprobs": 2, "echo": True}
            (choice,) = (await client.complete(ids, **asked).json())["choices"]
            found = choice["logprobs"]
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            assert found["token_logprobs"][1 : len(ids)] == pytest.approx(expected)
            best = rows.max(dim=-1).values.tolist()
            assert [max(top.values()) for top in found["top_logprobs"][1 : len(ids)]] == pytest.approx(best)
            assert len(found["tokens"]) == len(ids) + 4 and "".join(found["tokens"]) == choice["text"]
            plain = (await client.complete(ids, max_tokens=4, logprobs=2).json())["choices"][0]["logprobs"]
            assert found["token_logprobs"][len(ids) :] == plain["token_logprobs"]
            *chunks, _ = await client.complete(ids, stream=True, **asked).events()
            streamed = [one["choices"][0]["logprobs"] for one in chunks if one["choices"][0]["logprobs"]]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [value for one in streamed for value in one[name]] == found[name]
            scored = (await client.complete(ids, **asked | {"max_tokens": 0}).json())["choices"][0]
            assert scored["logprobs"]["token_logprobs"] == found["token_logprobs"][: len(ids)]
            await client.empty()

    run(main)


def test_without_a_prompt_a_text_begins() -> None:
    async def main() -> None:
        begin = model().tokenizer.bos_token_id
        begin = model().tokenizer.eos_token_id if begin is None else begin
        async with serving() as client:
            sent = {"temperature": 0, "max_tokens": 9, "return_token_ids": True}
            for more in ({}, {"prompt": None}):
                (found,) = (await client.send("/v1/completions", {**sent, **more}).json())["choices"]
                assert found["token_ids"] == engine_text([begin], max_new_tokens=9)[0]

    run(main)


def test_prompts_that_are_refused() -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ]

    async def main() -> None:
        async with serving() as client:
            for body, param in bodies:
                exchange = client.send(TEXT, body)
                assert (await exchange.json())["error"]["param"] == param
                assert exchange.status == 400

    run(main)


@pytest.mark.parametrize("echo", [False, True])
def test_a_streams_first_chunk_has_the_prompts_tokens(echo: bool) -> None:
    async def main() -> None:
        prompts = [model().tokens(text) for text in ("The dog", "A cat sat")]
        async with serving() as client:
            asked = {"n": 2, "max_tokens": 4, "stream": True, "return_token_ids": True, "echo": echo}
            *chunks, _ = await client.complete(prompts, **asked).events()
            for index in range(4):
                own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
                assert own[0].get("prompt_token_ids") == prompts[index // 2]
                assert not any("prompt_token_ids" in one for one in own[1:])

    run(main)

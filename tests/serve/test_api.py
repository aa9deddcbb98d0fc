"""The shapes of OpenAI's API, and that texts are the engine's."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.targets.plan import StepPlan
from serving import STORY, Client, model, run, serving, story


def test_log_probabilities_in_both_shapes_and_in_chunks() -> None:
    async def main() -> None:
        engine = Engine(model().target, tokenizer=model().tokenizer)
        (one,) = engine.generate([story()], SamplingParams(max_new_tokens=8, logprobs=2))
        assert one.logprobs is not None
        async with serving() as client:
            asked = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2}
            content = (await client.chat(**asked).json())["choices"][0]["logprobs"]["content"]
            assert [entry["logprob"] for entry in content] == pytest.approx([o.logprob for o in one.logprobs])
            assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == one.text
            assert all(len(entry["top_logprobs"]) == 2 for entry in content)
            assert all(set(entry["top_logprobs"][0]) == {"token", "logprob", "bytes"} for entry in content)
            *chunks, _ = await client.chat(stream=True, **asked).events()
            streamed = [
                entry
                for chunk in chunks
                if chunk["choices"][0]["logprobs"]
                for entry in chunk["choices"][0]["logprobs"]["content"]
            ]
            assert streamed == content
            older = (await client.complete(story(), max_tokens=8, logprobs=2).json())["choices"][0]
            assert older["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in content]
            assert older["logprobs"]["tokens"] == [entry["token"] for entry in content]
            assert older["logprobs"]["text_offset"][:2] == [0, len(content[0]["token"])]
            assert all(len(top) == 2 for top in older["logprobs"]["top_logprobs"])

    run(main)


def test_log_probabilities_are_written_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same response, of whichever pieces it consists, and prompts with too many are refused."""
    chat = {"logprobs": True, "top_logprobs": 3, "max_tokens": 7, "n": 2, "seed": 1, "temperature": 1}
    older = {"logprobs": 2, "echo": True, "max_tokens": 7}

    async def asked(client: Client) -> list[Any]:
        found = [await client.chat(**chat).json(), await client.complete(story(), **older).json()]
        streamed = await client.complete(story(), stream=True, **older).events()
        return [one["choices"] for one in (*found, streamed[0])]

    async def main() -> None:
        async with serving() as client:
            whole = await asked(client)
            monkeypatch.setattr("outpace.serve.writers._AT_ONCE", 2)
            assert await asked(client) == whole
            monkeypatch.setattr("outpace.serve.completions._SCORED", 3 * len(story()))
            assert await asked(client) == whole
            exchange = client.complete([story(), [5]], **older)
            assert (await exchange.json())["error"]["param"] == "logprobs" and exchange.status == 400
            assert client.service.admission.inside == 0

    run(main)


def test_usage_on_every_chunk() -> None:
    async def main() -> None:
        async with serving() as client:
            ours = {"include_usage": False, "continuous_usage_stats": True}
            *chunks, _ = await client.complete("A", max_tokens=2, stream=True, stream_options=ours).events()
            assert not any("usage" in chunk for chunk in chunks)
            options = {"include_usage": True, "continuous_usage_stats": True}
            *chunks, _ = await client.complete(
                "The", max_tokens=6, stream=True, stream_options=options
            ).events()
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts) and counts[-1] == 6 and counts[0] >= 1

    run(main)


def test_pages() -> None:
    async def main() -> None:
        async with serving(others={"copy": "prompt_lookup:branches=1"}) as client:
            models = await client.get("/v1/models")
            card, other = models["data"]
            assert other == {**card, "id": "other name"}
            called = await client.chat(model="other name", max_tokens=1).json()
            assert called["model"] == "other name"
            assert card["id"] == "nano" and card["max_model_len"] == 2048 and card["chat"] is True
            assert card["drafters"] == ["prompt_lookup", "off", "copy"]
            assert await client.get("/v1/models/nano") == card
            assert (await client.get("/v1/models/other"))["error"]["code"] == "model_not_found"
            health = await client.get("/health")
            assert health["status"] == "ok"
            assert [reason.partition(",")[0] for reason in health["slow"]] == [
                "weights are float64",
                "nothing decides how much to draft",
            ]
            assert await client.get("/health/ready") == {"status": "ready"}
            assert set(await client.get("/version")) == {"version"}
            assert "/v1/chat/completions" in (await client.get("/openapi.json"))["paths"]

    run(main)


def test_tokenize_and_detokenize() -> None:
    async def main() -> None:
        async with serving() as client:
            found = await client.send("/tokenize", {"prompt": "The dog", "return_token_strs": True}).json()
            assert found["tokens"] == model().tokens("The dog") and found["count"] == len(found["tokens"])
            assert len(found["token_strs"]) == found["count"] and found["max_model_len"] == 2048
            back = await client.send("/detokenize", {"tokens": found["tokens"]}).json()
            assert back == {"prompt": "The dog"}
            chat = await client.send("/tokenize", {"messages": STORY}).json()
            assert chat["token_strs"] is None
            assert chat["tokens"] == story()
            assert (await client.send("/detokenize", {"tokens": [4096]}).json())["error"]["param"] == "prompt"

    run(main)


def test_speculation_is_chosen_and_reported() -> None:
    async def main() -> None:
        async with serving(others={"copy": "prompt_lookup:branches=1"}) as client:
            asked = {
                "max_tokens": 40,
                "ignore_eos": True,
                "speculation_metrics": True,
                "return_token_ids": True,
            }
            texts = set()
            for speculation, used in [
                ("off", "off"),
                (False, "off"),
                (True, "prompt_lookup"),
                ("prompt_lookup", "prompt_lookup"),
                ("copy", "copy"),
                ({"drafter": "copy", "num_speculative_tokens": 2}, "copy"),
            ]:
                found = await client.chat(speculation=speculation, **asked).json()
                assert found["speculation"]["drafter"] == used
                measured = found["metrics"]["speculative_decoding"]
                assert (measured["num_draft_tokens"] > 0) == (used != "off")
                steps = measured["num_spec_steps"]
                assert sum(measured["acceptance_histogram"]) == steps
                assert steps + measured["num_accepted_draft_tokens"] >= 40
                texts.add(tuple(found["choices"][0]["token_ids"]))
            assert len(texts) == 1
            assert measured["num_draft_tokens"] <= 2 * steps
            assert "metrics" not in await client.chat(max_tokens=2).json()
            wrong = await client.chat(speculation="nothing").json()
            assert wrong["error"]["param"] == "speculation" and "'copy'" in wrong["error"]["message"]
            *_, chunk, _ = await client.chat(max_tokens=3, stream=True, speculation="off").events()
            assert chunk["choices"] == [] and chunk["speculation"]["drafter"] == "off"

    run(main)


def test_prompts_that_begin_alike_are_counted_as_cached() -> None:
    async def main() -> None:
        async with serving(change=_with_prefix_cache) as client:
            prompt = list(range(100, 260))
            first = await client.complete(prompt, max_tokens=2).json()
            again = await client.complete(prompt, max_tokens=2).json()
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
            assert first["choices"] == again["choices"]

    run(main)


def _with_prefix_cache(engine: Engine) -> None:
    from outpace.engine.prefix import PrefixCache

    engine._batch.memory.prefixes = PrefixCache(2**24)


def test_every_response_says_that_the_model_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [
        ("/v1/chat/completions", {"messages": STORY}),
        ("/v1/completions", {"prompt": "The dog"}),
        ("/v1/messages", {"messages": STORY}),
        ("/v1/responses", {"input": "Tell me a story.", "max_output_tokens": 4}),
    ]

    async def told() -> list[list[Any]]:
        """The field of each response, whole and in its first event."""
        found = []
        async with serving() as client:
            for path, body in paths:
                asked = body | ({} if "max_output_tokens" in body else {"max_tokens": 4})
                found.append([(await client.send(path, asked).json()).get("exactness")])
                events = await client.send(path, {**asked, "stream": True}).events()
                heads = [event.get("message", event.get("response", event)) for event in events[:1]]
                found[-1] += [head.get("exactness") for head in heads]
        return found

    assert all(one is None for one in chain(*run(told)))
    monkeypatch.setattr(type(model().target), "promise", "not exact")
    monkeypatch.setattr(model().target, "plan", StepPlan(why_inexact="the reason"))
    each = run(told)
    assert [len(one) for one in each] == [2] * len(paths)
    assert all(one == {"promise": "not exact", "reason": "the reason"} for one in chain(*each))

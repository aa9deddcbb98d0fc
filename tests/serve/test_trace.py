"""The opt-in trace: its contents for each step, and no cost for other requests."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.serve.trace import Traced
from serving import Client, run, serving

COMBINED = "combined:(lookahead:window=4)+(prompt_lookup)"
REPEATING = "one two three four five. one two three four five. one two"
ANSWER = "Lookahead decoding is a way to make a language model faster."
QUESTION = [{"role": "user", "content": "What is lookahead decoding?"}]


async def choices(client: Client, path: str, **more: Any) -> list[dict[str, Any]]:
    """The choices of all chunks of a stream."""
    body = {"temperature": 0, "stream": True, "max_tokens": 40, "return_token_ids": True, **more}
    chunks = await client.send(path, body).events()
    return [choice for chunk in chunks[:-1] for choice in chunk["choices"]]


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for choice in found)


def check(steps: list[dict[str, Any]]) -> None:
    """Each step's path is one of its tree, its tokens begin with it, and the drafters' counts reach it."""
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        tree, path = step["tree"], step["path"]
        assert [tree["parents"][node] for node in path] == [-1, *path][: len(path)]
        assert [tree["tokens"][node] for node in path] == step["tokens"][: len(path)]
        assert [tree["texts"][node] for node in path] == step["texts"][: len(path)]
        assert len(step["tokens"]) - len(path) in (0, 1)
        assert len(tree["tokens"]) <= sum(count["drafted"] for count in step["drafters"].values())
        assert len(path) == max((count["accepted"] for count in step["drafters"].values()), default=0)


@pytest.mark.parametrize("drafter", ["prompt_lookup", COMBINED, "off"])
def test_steps_are_those_of_the_tokens_and_of_the_text(drafter: str) -> None:
    async def main() -> None:
        async with serving(COMBINED, others={"prompt_lookup": "prompt_lookup"}) as client:
            asked = {} if drafter == COMBINED else {"speculation": drafter}
            found = await choices(client, "/v1/completions", prompt=REPEATING, trace=True, **asked)
            steps = [step for choice in found for step in choice.get("trace", ())]
            check(steps)
            assert [token for step in steps for token in step["tokens"]] == [
                token for choice in found for token in choice.get("token_ids", ())
            ]
            assert "".join(step["text"] for step in steps) == text_of(found)
            drafters = {name for step in steps for name in step["drafters"]}
            assert drafters == {"off": set(), COMBINED: {"lookahead", "prompt_lookup"}}.get(
                drafter, {drafter}
            )
            assert any(step["path"] for step in steps) == (drafter != "off")

    run(main)


def test_what_a_prediction_brought_is_told_from_the_rest() -> None:
    async def main() -> None:
        async with serving() as client:
            found = await choices(
                client,
                "/v1/chat/completions",
                messages=QUESTION,
                trace=True,
                prediction={"type": "content", "content": ANSWER},
                stream_options={"include_usage": True},
            )
            steps = [step for choice in found for step in choice.get("trace", ())]
            check(steps)
            reused = sum(step["drafters"].get("reference", {"accepted": 0})["accepted"] for step in steps)
            assert reused > 4

    run(main)


def test_each_choice_has_its_own_trace() -> None:
    async def main() -> None:
        async with serving(COMBINED) as client:
            found = await choices(
                client, "/v1/completions", prompt=REPEATING, n=2, seed=1, temperature=0.9, trace=True
            )
            for index in range(2):
                own = [choice for choice in found if choice["index"] == index]
                steps = [step for choice in own for step in choice.get("trace", ())]
                check(steps)
                assert [token for step in steps for token in step["tokens"]] == [
                    token for choice in own for token in choice.get("token_ids", ())
                ]

    run(main)


def test_without_it_nothing_is_noted_and_what_is_noted_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Traced]()
    of = Traced.of
    monkeypatch.setattr(Traced, "of", lambda params, trace: made.append(of(params, trace)) or made[-1])

    async def main() -> None:
        async with serving() as client:
            plain = await choices(client, "/v1/completions", prompt=REPEATING)
            assert not made and not any("trace" in choice for choice in plain)
            traced = await choices(client, "/v1/completions", prompt=REPEATING, trace=True)
            assert text_of(traced) == text_of(plain)  # in other chunks, as the governor's steps differ
            (params,) = made
            assert not params.trace._noted

    run(main)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_in_one_piece_has_no_trace(path: str) -> None:
    async def main() -> None:
        async with serving() as client:
            asked = {"messages": QUESTION} if "chat" in path else {"prompt": REPEATING}
            exchange = client.send(path, {**asked, "trace": True})
            error = (await exchange.json())["error"]
            assert exchange.status == 400 and error["param"] == "trace"

    run(main)

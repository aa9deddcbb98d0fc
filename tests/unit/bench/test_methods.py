"""Lists of methods, and the methods of this process: same tokens, correct counts, no state left."""

from __future__ import annotations

import copy
import re
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from outpace import names
from outpace.bench import peers
from outpace.bench.methods import make_methods, split_drafters
from outpace.bench.ours import Ours
from outpace.bench.peers import Peer, PeerOptions, split_peers, versions_of
from outpace.bench.runs import MethodRun, PromptBatch
from outpace.bench.stock import StockMethod
from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.parts import Adaptive
from outpace.loading import Loaded
from outpace.policy.governor import Governor

TEXTS = ("abcabcabcabc", "xyz", "aaaaaaab")


def request(model: Loaded, texts: tuple[str, ...] = TEXTS[:1], **more: Any) -> PromptBatch:
    given = {"max_new_tokens": 20, "ends": False, "temperature": 0.0, "seeds": list(range(len(texts)))}
    return PromptBatch([model.tokens(text) for text in texts], [[]] * len(texts), **{**given, **more})


def plain(model: Loaded, asked: PromptBatch) -> list[list[int]]:
    params = [
        SamplingParams(
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            seed=seed,
            ignore_eos=not asked.ends,
        )
        for seed in asked.seeds
    ]
    return [one.tokens for one in model.engine().generate(asked.prompts, params)]


# -- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lookahead", ["none", "lookahead"]),
        ("suffix,none,jacobi", ["none", "suffix", "jacobi"]),
        (
            "none,lookahead:window=7,ngram=5,prompt_lookup:branches=1",
            ["none", "lookahead:window=7,ngram=5", "prompt_lookup:branches=1"],
        ),
        (
            'none,{"method": "combined", "parts": ["jacobi", {"method": "lookahead", "window": 3}]},suffix',
            ["none", "combined:parts=(jacobi)+(lookahead:window=3)", "suffix"],
        ),
        (
            "combined:(lookahead:window=3,ngram=3)+(prompt_lookup),suffix",
            ["none", "combined:(lookahead:window=3,ngram=3)+(prompt_lookup)", "suffix"],
        ),
    ],
)
def test_drafters_are_split_at_their_own_commas(text: str, expected: list[str]) -> None:
    assert split_drafters(text) == expected


@pytest.mark.parametrize(("text", "reason"), [("a,,b", "empty name"), ("", "empty"), ("a,b,a", "a twice")])
def test_lists_of_drafters_that_are_none(text: str, reason: str) -> None:
    with pytest.raises(OutpaceError, match=reason):
        split_drafters(text)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer of another package, and an entry point that is none."""
    found = {
        "theirs": EntryPoint("theirs", "unit.bench.told:THEIRS", "outpace.peers"),
        "wrong": EntryPoint("wrong", "unit.bench.told:Told", "outpace.peers"),
    }
    for module in (names, peers):
        monkeypatch.setattr(module, "installed", lambda group: found if group == "peers" else {})


@pytest.mark.usefixtures("theirs")
def test_peers() -> None:
    assert split_peers("none") == []
    assert [peer.name for peer in split_peers("transformers")] == [
        "transformers:plain",
        "transformers:prompt_lookup",
        "transformers:assisted",
    ]
    assert split_peers("transformers:plain, theirs=/some/venv") == [
        Peer("transformers", "plain"),
        *(Peer("theirs", kind, Path("/some/venv")) for kind in ("plain", "fast")),
    ]


@pytest.mark.usefixtures("theirs")
def test_a_peer_of_another_package_is_a_method(model: Loaded) -> None:
    found = make_methods(model, ["none"], "match", "auto", split_peers("theirs"), PeerOptions())
    assert [method.name for method in found] == ["none", "theirs:plain", "theirs:fast"]
    assert versions_of(found) == {}
    found[2].versions = {"theirs": "1.2"}
    assert versions_of(found) == {"theirs": {"theirs": "1.2"}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sglang", "no peer 'sglang'. There are: transformers, theirs"),
        ("theirs:eagle", "theirs has no method 'eagle'. It has: plain, fast"),
        ("transformers=/venv", "leave its path out"),
        ("theirs=/a,theirs:plain=/b", "theirs:plain twice"),
        ("vllm", "vllm is in outpace-lab: pip install "),
        ("wrong", "and a peer is an outpace.bench.peers.Library"),
    ],
)
@pytest.mark.usefixtures("theirs")
def test_peers_that_are_none(text: str, reason: str) -> None:
    with pytest.raises(OutpaceError, match=re.escape(reason)):
        split_peers(text)


def test_what_a_peer_lacks_is_named(model: Loaded) -> None:
    def make(text: str, **options: Any) -> None:
        make_methods(model, ["none"], "match", "auto", split_peers(text), PeerOptions(**options))

    with pytest.raises(OutpaceError, match="add --assistant MODEL"):
        make("transformers:assisted")
    with pytest.raises(OutpaceError, match=r"cannot load the assistant .*give another --assistant"):
        make("transformers:assisted", assistant="/no/such/folder")
    with pytest.raises(OutpaceError, match=r"block.*verifies chains"):
        make_methods(model, ["none", "lookahead"], "block", "auto", [], PeerOptions())


# -- ours ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["none", "lookahead", "prompt_lookup:branches=1", "suffix"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ours_says_what_plain_decoding_says(model: Loaded, spec: str, temperature: float) -> None:
    asked = request(model, TEXTS, temperature=temperature)
    method = Ours(model.target, spec, temperature=temperature)
    found = method.run(asked)
    assert found.outputs == plain(model, asked)
    assert found.tokens == 60 and method.promised
    assert found.steps is not None and found.accepted is not None
    # Of each step one token is the target's own; but the last of an answer may be a drafted one.
    assert 0 <= found.steps - (found.tokens - found.accepted) <= 3
    assert found.first_tokens >= 3 and found.forwards is not None and found.forwards <= 20
    assert sum(found.accepted_at) == found.accepted
    if spec == "none":
        assert (found.steps, found.forwards, found.drafted, found.first_tokens) == (60, 20, 0, 3)
    assert 0 < found.first_seconds < found.seconds
    assert found.draft_seconds is not None and found.verify_seconds is not None
    assert found.draft_seconds + found.verify_seconds <= found.seconds - found.first_seconds


def test_the_first_step_ends_when_all_prompts_are_read(
    model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.bench.ours.Engine", partial(Engine, prefill_chunk=16))
    long = "abcd" * 12
    found = Ours(model.target, "none").run(request(model, (long,)))
    assert (found.steps, found.forwards, found.first_tokens) == (20, 20, 1)
    assert found.first_seconds == found.token_seconds[0][0]

    both = Ours(model.target, "none").run(request(model, (TEXTS[1], long)))
    assert both.forwards == 20 and both.first_tokens > 2
    assert both.first_seconds == both.token_seconds[1][0]


def test_a_new_beginning_forgets_outputs(model: Loaded) -> None:
    method, asked = Ours(model.target, "suffix", adaptive=False), request(model, ("qwertz",))
    before = method.run(asked).steps
    again = method.run(asked).steps
    assert before is not None and again is not None and again < before  # it remembers the answer
    method.begin()
    assert method.run(asked).steps == before


@pytest.mark.parametrize("given", [True, "auto", False])
def test_only_what_drafts_is_governed(model: Loaded, given: Adaptive) -> None:
    methods = make_methods(model, ["none", "prompt_lookup"], "match", given, [], PeerOptions())
    governed = [isinstance(method, Ours) and method._engine.governor is not None for method in methods]
    assert governed == [False, given is not False]
    assert governed == [method.adaptive for method in methods]


def test_a_new_suite_begins_with_measured_costs_and_no_acceptance(model: Loaded) -> None:
    def told() -> tuple[Governor, float]:
        governor = method._engine.governor
        assert isinstance(governor, Governor)
        return governor, governor.acceptance.expected()[0][1]

    method = Ours(model.target, "prompt_lookup", adaptive=True)
    _, unknown = told()
    method.run(request(model, ("a" * 30,), max_new_tokens=30))
    before, learned = told()
    assert learned != unknown
    method.begin()
    assert told() == (before, learned)  # a repeat goes on
    method.begin(anew=True)
    after, forgotten = told()
    assert forgotten == unknown and (after.widths, after.ramp) == (before.widths, before.ramp)
    assert after.costs() == before.costs() and after.costs()["verify"]
    assert method.adaptive


def test_answers_end_at_an_end_token_only_where_asked(ending_model: Loaded) -> None:
    texts = ("abcdef", "xyz")
    fixed, ending = request(ending_model, texts), request(ending_model, texts, ends=True)
    whole = Ours(ending_model.target, "none").run(fixed)
    ended = Ours(ending_model.target, "none").run(ending)
    assert [len(output) for output in whole.outputs] == [20, 20]
    assert ended.outputs[0] == whole.outputs[0][:5] and len(ended.outputs[1]) > 5
    assert ended.outputs == plain(ending_model, ending)
    assert stock(ending_model, "plain").run(fixed).outputs == whole.outputs
    assert stock(ending_model, "plain").run(ending).outputs == ended.outputs
    lone = request(ending_model, texts[:1], ends=True)
    assert stock(ending_model, "prompt_lookup").run(lone).outputs == ended.outputs[:1]


def test_what_a_verifier_promises(model: Loaded) -> None:
    def promised(spec: str, verifier: str, temperature: float) -> tuple[bool, bool]:
        method = Ours(model.target, spec, verifier, temperature=temperature)
        return method.promised, method.lossy

    assert promised("prompt_lookup", "match", 1.0) == (True, False)
    assert promised("prompt_lookup", "rejection", 0.0) == (True, False)
    assert promised("prompt_lookup", "rejection", 1.0) == (False, False)
    assert promised("prompt_lookup", "loose:Loose", 0.0) == (False, True)
    assert promised("none", "loose:Loose", 0.0) == (True, False)


def test_a_tiny_top_p_keeps_the_greedy_token(model: Loaded) -> None:
    greedy, whole = request(model, TEXTS[:1]), request(model, TEXTS[:1], temperature=1.0)
    cut = request(model, TEXTS[:1], temperature=1.0, top_p=1e-6)
    for method in (
        Ours(model.target, "prompt_lookup", temperature=1.0),
        stock(model, "plain", temperature=1.0),
    ):
        assert method.run(cut).outputs == method.run(greedy).outputs != method.run(whole).outputs


def test_references_reach_the_drafter_that_reads_them(model: Loaded) -> None:
    asked = request(model)
    answer = plain(model, asked)[0]
    asked = PromptBatch(asked.prompts, [[answer]], 20, False, 0.0, [0])
    found = Ours(model.target, "reference").run(asked)
    assert found.outputs == [answer]
    assert found.steps is not None and found.steps < Ours(model.target, "none").run(asked).steps  # type: ignore[operator]
    assert Ours(model.target, "prompt_lookup").run(asked).outputs == [answer]


# -- transformers ----------------------------------------------------------------------------------------


def stock(model: Loaded, kind: str, **more: Any) -> StockMethod:
    peer: Any = model.target
    assistant = copy.deepcopy(peer.model) if kind == "assisted" else None
    return StockMethod(peer.model, kind, assistant, **more)


@pytest.mark.parametrize("kind", ["plain", "prompt_lookup", "assisted"])
def test_transformers_says_what_plain_decoding_says(model: Loaded, kind: str) -> None:
    asked = request(model)
    found = stock(model, kind).run(asked)
    assert found.outputs == plain(model, asked)
    assert found.steps is not None and found.accepted is not None and found.drafted is not None
    assert found.tokens == 20 == found.steps + found.accepted
    assert sum(found.accepted_at) == found.accepted <= found.drafted
    assert (found.drafted > 0) == (kind != "plain")
    if kind == "assisted":
        assert found.steps < 20  # the assistant says the same as the model
    assert 0 < found.first_seconds < found.seconds


def test_transformers_with_several_prompts_at_once(model: Loaded) -> None:
    asked = request(model, TEXTS)
    found = stock(model, "plain").run(asked)
    assert found.outputs == plain(model, asked)
    assert (found.steps, found.forwards, found.first_tokens) == (60, 20, 3)


def test_transformers_is_left_as_it_was(model: Loaded) -> None:
    target: Any = model.target
    before, hooks = target.model.generation_config, len(target.model._forward_hooks)
    stock(model, "plain").run(request(model))
    with pytest.raises(Exception):  # noqa: B017 (whatever transformers raises at a token that it lacks)
        stock(model, "plain").run(PromptBatch([[10**6]], [[]], 4, False, 0.0, [0]))
    assert target.model.generation_config is before
    assert len(target.model._forward_hooks) == len(target.model._forward_pre_hooks) == hooks == 0


def test_transformers_with_a_draft_that_takes_all_at_once(model: Loaded) -> None:
    found: MethodRun = stock(model, "prompt_lookup").run(request(model, ("a" * 30,), max_new_tokens=2))
    assert found.tokens == 2


def test_sampled_no_peer_promises_our_tokens(model: Loaded) -> None:
    assert stock(model, "plain").promised
    sampled = stock(model, "plain", temperature=1.0)
    assert not sampled.promised
    asked = request(model, temperature=1.0)
    assert sampled.run(asked).outputs == sampled.run(asked).outputs != plain(model, asked)

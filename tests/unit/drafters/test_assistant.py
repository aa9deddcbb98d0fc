"""Gemma 4's assistants: tokens, what is drafted, and assistants that do not fit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import outpace
from accelerator import Accelerator
from assistant_folders import SHARED, SIZE, VOCABULARY, assistant, gemma, learn, write
from models import tiny_llama
from outpace import Engine, SamplingParams, Target
from outpace.core import OutpaceError
from outpace.drafters.assistant.assistant import Assistant
from outpace.drafters.assistant.assistant_module import AssistantModule
from outpace.targets import TargetModel
from parts import in_turn

NEW = 24
PROMPTS = [random.Random(length).choices(range(VOCABULARY), k=length) for length in (21, 5, 30, 2, 9)]
GREEDY = SamplingParams(max_new_tokens=NEW)
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=0.8, top_p=0.9, seed=5)
WARM = SamplingParams(max_new_tokens=NEW, temperature=0.6, top_k=8, repetition_penalty=1.3, seed=1)
K = 4

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@cache
def target_of(shared: int) -> TargetModel:
    return Target(gemma(shared))


@cache
def plain_of(shared: int, params: SamplingParams) -> list[list[int]]:
    return [found.tokens for found in Engine(target_of(shared)).generate(PROMPTS, params)]


@cache
def taught(shared: int, ordered: bool = False) -> Any:
    """An assistant that has learned the target's texts, of which the ends it saw least."""
    made = assistant(ordered=ordered)
    texts = [prompt + own for prompt, own in zip(PROMPTS, plain_of(shared, GREEDY), strict=True)]
    shortest = min(map(len, texts))
    learn(made, target_of(shared).model, [text[-shortest:] for text in texts])
    made.generation_config.num_assistant_tokens = K
    return made


@pytest.mark.parametrize(
    ("shared", "ordered", "options", "params"),
    in_turn(
        [(0, False, {}), (SHARED, False, {}), (SHARED, True, {}), (0, False, {"expand": 3, "max_nodes": 9})],
        [GREEDY, SAMPLED, WARM],
    ),
)
def test_tokens_are_those_of_plain_decoding(
    shared: int, ordered: bool, options: dict[str, int], params: SamplingParams
) -> None:
    target, plain = target_of(shared), plain_of(shared, params)
    drafter = Assistant(path=taught(shared, ordered), **options)
    found = Engine(target, drafter, adaptive=False).generate(PROMPTS[:1], params)
    assert [one.tokens for one in found] == plain[:1]
    engine = Engine(target, drafter, adaptive=False, prefill_chunk=7)
    early = [engine.add(prompt, params) for prompt in PROMPTS[:3]]
    for _ in range(3):
        engine.step()
    late = [engine.add(prompt, params) for prompt in PROMPTS[3:]]
    while engine.sequences:
        engine.step()
    assert [sequence.output for sequence in (*early, *late)] == plain
    if params is GREEDY:
        accepted = sum(one.stats.accepted for one in found)
        assert accepted > NEW // 3, "too little was accepted to test anything"


def test_a_model_is_accelerated_by_folder(tmp_path: Path) -> None:
    model = gemma(SHARED, torch.float32)
    ids = torch.tensor([PROMPTS[0]])
    stock = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    outpace.accelerate(model, f"combined:(suffix)+(assistant:path={write(tmp_path)})", adaptive=False)
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), stock)


# -- what is drafted -------------------------------------------------------------------------------------

Drafts = list[tuple[list[int], list[int]]]  # the text before a draft, and the draft


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """The drafts to come, with their texts."""
    drafts: Drafts = []
    propose = Assistant.propose

    def noted(self: Assistant, states: Any) -> Any:
        found = propose(self, states)
        drafts.extend(
            (list(s.sequence.tokens), list(own.tokens)) for s, own in zip(states, found, strict=True)
        )
        return found

    monkeypatch.setattr(Assistant, "propose", noted)
    return drafts


@pytest.mark.parametrize("options", [{}, pytest.param({"expand": 3, "max_nodes": 9}, marks=pytest.mark.slow)])
def test_drafts_on_an_emulated_gpu_are_the_cpus(watched: Drafts, options: dict[str, int]) -> None:
    def engine_of(model: Any) -> Engine:
        target = Target(model, check=False)
        return Engine(target, Assistant(path=taught(SHARED), **options), adaptive=False, slots=2)

    def decoded(engine: Engine) -> list[list[int]]:
        found = engine.generate(PROMPTS[1:3], replace(GREEDY, max_new_tokens=8))
        assert any(one.stats.accepted for one in found)
        return [one.tokens for one in found]

    expected, model = decoded(engine_of(gemma(SHARED))), gemma(SHARED)
    drafts = watched[:]
    with Accelerator("cuda") as on:
        engine = engine_of(model.to("cuda:0"))
        on.counts.clear()
        assert decoded(engine) == expected
        assert on.counts.replays and not on.counts.blocking, on.counts.blocking
    assert watched[len(drafts) :] == drafts


@torch.no_grad()
def drafted_by(made: Any, model: Any, text: list[int], count: int) -> list[int]:
    """A greedy draft by transformers' assistant, from a forward of the target over the committed text."""
    told = model(
        torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
    )
    state, token, draft = told.hidden_states[-1][:, -1:], text[-1], []
    for _ in range(count):
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        out = made(
            inputs_embeds=torch.cat([embedded, state], dim=-1),
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=dict(told.shared_kv_states),
        )
        state, token = out.last_hidden_state, int(out.logits.argmax())
        draft.append(token)
    return draft


@pytest.mark.parametrize(("shared", "ordered"), in_turn([0, SHARED], [False, True]))
def test_drafts_are_those_of_a_plain_computation(shared: int, ordered: bool, watched: Drafts) -> None:
    """Past the window of 8, in a batch whose sequences have other lengths."""
    target, made = target_of(shared), assistant(ordered=ordered).double()
    Engine(target, Assistant(path=made, num_speculative_tokens=3), adaptive=False, prefill_chunk=7).generate(
        PROMPTS, GREEDY
    )
    whole = [(text, draft) for text, draft in watched if len(draft) == 3]
    assert len(whole) > 50
    for text, draft in whole:
        assert draft == drafted_by(made, target.model, text, 3)


def without_the_next_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves one row too many: that of the rejected token at the root's place."""
    stock = SinglePositionMultiTokenCandidateGenerator.get_candidates

    def cut(self: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        if (told := options["model_outputs"]) is not None:
            end = input_ids.shape[1] - 1
            for kind, pair in told.shared_kv_states.items():
                told.shared_kv_states[kind] = tuple(one[:, :, :end] for one in pair)
        return stock(self, input_ids, *args, **options)

    monkeypatch.setattr(SinglePositionMultiTokenCandidateGenerator, "get_candidates", cut)


@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[3]], ids=["five", "two"])
def test_accepted_lengths_are_those_of_transformers(
    prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, one sequence, while transformers' cache of the window still begins at the text."""
    wide = gemma(0, sliding_window=64)
    target, made = Target(wide), assistant(sliding_window=64)
    (own,) = Engine(target).generate([prompt], GREEDY)
    learn(made, wide, [prompt + own.tokens])
    made.generation_config.num_assistant_tokens = K
    without_the_next_place(monkeypatch)
    lengths: list[int] = []
    candidates = SinglePositionMultiTokenCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        lengths.append(input_ids.shape[1])
        return candidates(self, input_ids, *args, **options)

    monkeypatch.setattr(SinglePositionMultiTokenCandidateGenerator, "get_candidates", noted)
    theirs = wide.generate(torch.tensor([prompt]), assistant_model=made, max_new_tokens=NEW, do_sample=False)[
        0
    ].tolist()
    assert theirs == prompt + own.tokens
    engine = Engine(target, Assistant(path=made), adaptive=False)
    sequence = engine.add(prompt, GREEDY)
    ours = []
    while engine.sequences:
        ours.append(len(sequence.tokens))
        engine.step()
    assert ours == lengths
    assert len(ours) < NEW - 5, "nothing was accepted"


def test_logits_do_not_depend_on_the_batch() -> None:
    """transformers gives tokens outside the chosen clusters a number that depends on all rows."""
    module = AssistantModule.of(assistant(ordered=True), target_of(0))
    rows = torch.randn(5, 3 * SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    head = module.head(None)
    alone = torch.cat([head(module.states(row[None])) for row in rows])
    assert torch.allclose(head(module.states(rows)), alone)
    assert alone.isinf().any() and not alone.isinf().all(dim=-1).any()


# -- what does not fit -----------------------------------------------------------------------------------


def change(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **entries}), "utf-8")


def lacks_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["pre_projection.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def other(**options: Any) -> Callable[[Path], None]:
    return lambda folder: void(write(folder, **options))


def void(_: Any) -> None:
    pass


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "vocabulary": (other(vocab_size=84), "vocab_size is 84.*has 96"),
    "backbone": (other(backbone=48), "backbone_hidden_size is 48.*has 32"),
    "head": (other(head_dim=12), "head size of sliding_attention is 12.*has 8"),
    "heads": (other(num_key_value_heads=1), "key-value heads of sliding_attention is 1.*has 2"),
    "weight": (lacks_a_weight, "incomplete; missing are pre_projection.weight"),
    "kind": (lambda folder: change(folder, model_type="llama"), "model_type 'llama'; it reads gemma4_assis"),
    "muse": (
        lambda folder: change(folder, model_type="muse_glimmer_assistant"),
        "the drafter dflash reads: dflash:path=",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_assistant_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    spoil, words = WRONG[case]
    spoil(write(tmp_path))
    with pytest.raises(OutpaceError, match=f"assistant.*{words}") as caught:
        Engine(target_of(0), f"assistant:path={tmp_path}")
    assert "\n" not in str(caught.value)


def test_a_target_without_shared_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match=r"Gemma 4's layers share, and LlamaForCausalLM.*another drafter"):
        Engine(Target(tiny_llama()), Assistant(path=write(tmp_path)))


def test_no_path_and_no_assistant_are_refused() -> None:
    with pytest.raises(OutpaceError, match="assistant: it needs path"):
        Engine(target_of(0), "assistant")
    with pytest.raises(OutpaceError, match="LlamaForCausalLM is none"):
        Engine(target_of(0), Assistant(path=tiny_llama()))

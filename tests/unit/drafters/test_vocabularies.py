"""A draft model with another tokenizer: exact, and its drafts are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.draws.noise import Key
from outpace.engine.engine import Engine
from outpace.sequence import Sequence
from outpace.targets import Rows
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget, check_drafter
from parts import first
from tokenizers_of import STORY, byte_level, sentencepiece_like

TARGET, OWN, OTHER = byte_level(400), byte_level(330), sentencepiece_like(150)
SOME, FEW = sentencepiece_like(70), sentencepiece_like(60)
TEXTS = ["The miller", " and you took", "\u201cWell", "\u201c na\u00efve"]
PROMPTS = [TARGET(text).input_ids for text in TEXTS]
HOW: dict[str, dict[str, Any]] = {
    "intersection": {"vocabulary": "intersection"},
    "intersection_tree": {"vocabulary": "intersection", "branching": "2x2"},
    "text": {"vocabulary": "text", "num_speculative_tokens": 6},
    "text_drawn": {"vocabulary": "text", "draws": "independent"},
}


def teller(tokenizer: Any, surprise: float, seed: int = 0, habit: float = 9.0) -> ToyTarget:
    """A model that mostly continues the story, in a tokenizer's own tokens."""
    toy = ToyTarget(len(tokenizer), 400, seed, tokenizer.eos_token_id, surprise)
    toy._habit.zero_()
    tokens = tokenizer(STORY.replace("\u2013", "-")).input_ids
    for token, after in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
        if not toy._habit[token].any():
            toy._habit[token, after] = habit
    return toy


def params(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=24, temperature=temperature, seed=s) for s in range(len(PROMPTS))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("own", [OWN, OTHER], ids=["bytes", "chars"])
def test_tokens_are_those_of_plain_decoding(own: Any, how: str, temperature: float) -> None:
    target = teller(TARGET, 0.3)
    drafter = DraftModel(teller(own, 0.1, seed=1), tokenizer=own, target_tokenizer=TARGET, **HOW[how])
    found = Engine(target, drafter, adaptive=False).generate(PROMPTS, params(temperature))
    plain = Engine(target).generate(PROMPTS, params(temperature))
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert sum(g.stats.accepted for g in found) > 10


def test_an_intersection_keeps_the_contract() -> None:
    model = teller(FEW, 0.5, seed=1, habit=3.0)
    drafter = DraftModel(
        model, 2, "independent", vocabulary="intersection", tokenizer=FEW, target_tokenizer=SOME
    )
    check_drafter(drafter, teller(SOME, 0.5, habit=3.0))


@pytest.mark.parametrize("how", first(1, ["intersection_tree", "text_drawn", "intersection", "text"]))
def test_under_rejection_texts_are_distributed_as_the_target_says(how: str) -> None:
    target = teller(SOME, 0.5, habit=3.0)
    prompt, draws = SOME("The miller").input_ids, 1000
    drafter = DraftModel(
        teller(FEW, 0.5, seed=1, habit=3.0), tokenizer=FEW, target_tokenizer=SOME, **HOW[how]
    )
    params = [SamplingParams(max_new_tokens=3, temperature=1.0, seed=seed) for seed in range(draws)]
    found = Engine(target, drafter, "rejection").generate([prompt] * draws, params)
    assert 0 < sum(g.stats.accepted for g in found) < sum(g.stats.drafted for g in found)
    # Of the first two tokens; where the first ends the text there is no second, and that is token 0 again.
    counts = torch.zeros(len(SOME), len(SOME), dtype=torch.float64)
    for g in found:
        counts[g.tokens[0], g.tokens[1] if len(g.tokens) > 1 else 0] += 1
    expected = chances(target, prompt) * draws
    # A bias is clearer in the cells of the first token alone.
    for tables in ((counts.sum(1), expected.sum(1)), (counts, expected)):
        likely = tables[1] >= 5
        cells = [torch.cat([table[likely], table[~likely].sum()[None]]) for table in tables]
        assert len(cells[0]) > 20
        assert chisquare(*cells).pvalue > 1e-4


def chances(target: ToyTarget, prompt: list[int]) -> Tensor:
    """Chances of the first and the second token, [vocabulary, vocabulary]."""
    cache = target.new_cache(target.vocabulary)
    feeds = {cache.allocate(): Rows([*prompt, token]) for token in range(target.vocabulary)}
    output = target.forward(cache, Batch.of(feeds))
    rows = torch.stack([output.logits_of(slot) for slot in feeds]).softmax(dim=-1)
    second = rows[:, -1].clone()
    for end in target.eos_token_ids:
        second[end] = torch.eye(target.vocabulary, dtype=torch.float64)[0]
    return rows[0, -2, :, None] * second


def test_penalties_and_filters_apply_to_what_both_have() -> None:
    target = teller(TARGET, 0.3)
    drafter = DraftModel(
        teller(OWN, 0.1, seed=1), vocabulary="intersection", tokenizer=OWN, target_tokenizer=TARGET
    )
    own = SamplingParams(
        max_new_tokens=24, temperature=0.9, top_p=0.9, repetition_penalty=1.1, logit_bias={70: 2.0}, seed=2
    )
    found = Engine(target, drafter, adaptive=False).generate(PROMPTS, own)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(target).generate(PROMPTS, own)]


@pytest.mark.parametrize("how", ["intersection", "text"])
def test_tiny_llamas_with_two_tokenizers(how: Any) -> None:
    target = tiny_llama(vocabulary=len(TARGET))
    drafter = DraftModel(
        tiny_llama(vocabulary=len(OWN), seed=1), vocabulary=how, tokenizer=OWN, target_tokenizer=TARGET
    )
    found = Engine(target, drafter, adaptive=False).generate(PROMPTS, params(1.0))
    assert [g.tokens for g in found] == [g.tokens for g in Engine(target).generate(PROMPTS, params(1.0))]


def test_only_tokens_of_both_are_drafted_in_the_targets_ids_and_normalised() -> None:
    drafter = DraftModel(
        teller(OTHER, 0.5), vocabulary="intersection", tokenizer=OTHER, target_tokenizer=TARGET
    )
    sampled = SamplingParams(max_new_tokens=30, temperature=1.0, seed=1)
    state_of = drafter.prepare(teller(TARGET, 0.3))
    (draft,) = drafter.propose([drafter.start(Sequence(PROMPTS[0], sampled, Key(1), limit=30), state_of)])
    assert draft.distributions is not None and len(draft) == 4
    for row in draft.distributions.values():
        assert row.shape == (len(TARGET),) and float(row.sum()) == pytest.approx(1)
        drafted = {TARGET.decode([int(token)]) for token in row.nonzero()}
        assert 20 < len(drafted) < len(OTHER)
        assert drafted <= {OTHER.decode([token]) for token in range(len(OTHER))} | {TARGET.eos_token}


def test_the_same_vocabulary_by_intersection_is_the_same() -> None:
    """All tokens are in both: the draft is the one without translation, in another order of tokens too."""
    target, draft = teller(TARGET, 0.5), teller(TARGET, 0.4)
    plain = Engine(target, DraftModel(draft), adaptive=False).generate(PROMPTS, params(1.0))
    both = DraftModel(draft, vocabulary="intersection", tokenizer=TARGET, target_tokenizer=TARGET)
    found = Engine(target, both, adaptive=False).generate(PROMPTS, params(1.0))
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    # Texts that the target spells otherwise than its tokenizer would are read otherwise: a little is lost.
    assert sum(g.stats.accepted for g in found) > 0.8 * sum(g.stats.accepted for g in plain) > 10


def test_tokenizers_that_lie_beside_the_models_are_taken(tmp_path: Path) -> None:
    own = tiny_llama(vocabulary=len(OWN))
    own.save_pretrained(tmp_path / "own")
    OWN.save_pretrained(tmp_path / "own")
    target = tiny_llama(vocabulary=len(TARGET))
    target.save_pretrained(tmp_path / "target")
    TARGET.save_pretrained(tmp_path / "target")
    named = type(target).from_pretrained(tmp_path / "target", dtype=torch.float64)
    Engine(named, DraftModel(tmp_path / "own", vocabulary="text"))
    given = DraftModel(tmp_path / "own", vocabulary="intersection", target_tokenizer=str(tmp_path / "target"))
    Engine(target, given)
    with pytest.raises(OutpaceError, match="needs both tokenizers; give target_tokenizer"):
        Engine(target, DraftModel(tmp_path / "own", vocabulary="text"))


def test_vocabularies_that_differ_are_refused_with_the_remedy() -> None:
    with pytest.raises(OutpaceError, match="330 token ids and the target 391; use vocabulary=intersection"):
        Engine(teller(TARGET, 1.0), DraftModel(teller(OWN, 1.0)))
    renamed = byte_level(400, ("<|stop|>",))
    same_size = DraftModel(teller(renamed, 1.0), tokenizer=renamed, target_tokenizer=TARGET)
    with pytest.raises(OutpaceError, match=r"token 0 is '<\|stop\|>' to the draft"):
        Engine(teller(TARGET, 1.0), same_size)
    with pytest.raises(OutpaceError, match="vocabulary=text needs both tokenizers; give tokenizer"):
        Engine(ToyTarget(), DraftModel(ToyTarget(), vocabulary="text"))

"""Look-ahead embeddings: rows beyond the vocabulary follow guesses and predict the tokens after them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learning import train
from models import tiny_llama
from outpace.cache import Window
from outpace.core import Draft, OutpaceError, SamplingParams, UnsupportedModel
from outpace.drafters.combined.combined import Combined
from outpace.drafters.support.draws import Noise
from outpace.draws.logits import Logits
from outpace.engine.engine import Engine
from outpace.sequence import Sequence, Step
from outpace.targets import CausalTarget, Output, Rows, TargetModel
from outpace.targets.batch import Batch
from outpace.targets.inputs.forward import laid_out
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import depths, trim
from outpace_lab.drafters.parallel_tokens import Ahead, LookAhead, LookAheadConfig, ParallelTokens
from outpace_lab.train.data import Document
from outpace_lab.train.metric import Replay
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import TrainingBatch

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 12), *range(1, 12)]]
LONG = SamplingParams(max_new_tokens=41, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=41, temperature=0.8, seed=3, ignore_eos=True)


class Clairvoyant(ToyTarget):
    """A target whose prediction depends on the position alone, so that look-ahead rows predict it too."""

    extra = 9

    def with_embeddings(self, table: Tensor | int) -> Clairvoyant:
        return self

    def _pass(self, window: Window, batch: Any, hidden_layers: Seq[int]) -> Output:
        feeds = batch.rows
        logits = torch.zeros(len(window.slots), window.width, self.vocabulary, dtype=torch.float64)
        for place, (slot, offset) in enumerate(zip(window.slots, window.offsets, strict=True)):
            for node, depth in enumerate(depths(feeds[slot].tree) if slot in feeds else ()):
                random = torch.Generator().manual_seed(offset + depth)
                logits[place, node] = 3 * torch.randn(self.vocabulary, generator=random, dtype=torch.float64)
        return laid_out(window.slots, batch, logits if len(batch.read) else None, 0, {})


@pytest.mark.parametrize("behind", ["all", "root"])
@pytest.mark.slow
def test_it_keeps_the_contract(behind: str) -> None:
    check_drafter(ParallelTokens(None, 3, behind))  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [LONG, SAMPLED])
@pytest.mark.parametrize(("behind", "count"), [("all", 1), ("all", 3), ("root", 3)])
def test_where_nothing_counts_but_the_place_every_guess_is_accepted(
    params: SamplingParams, behind: str, count: int
) -> None:
    target = Clairvoyant()
    plain = Engine(target).generate(PROMPTS, params)
    drafter = ParallelTokens(None, count, behind)  # type: ignore[arg-type]
    for found, expected in zip(
        Engine(target, drafter, adaptive=False).generate(PROMPTS, params), plain, strict=True
    ):
        assert found.tokens == expected.tokens
        # The last draft is cut to what is still allowed.
        assert 0 <= found.stats.extra["guesses"] - found.stats.accepted <= count
        # The first step only looks ahead; behind the root only, so does every other one.
        pair = 2 + count
        steps = 1 + -(-40 // (count + 1)) if behind == "all" else 2 * (41 // pair) + min(41 % pair, 2)
        assert found.stats.steps == steps


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("draws", ["coupled", "independent"])
def test_its_distributions_serve_the_verifiers_that_weigh(verifier: str, draws: Noise) -> None:
    drafter = ParallelTokens(num_speculative_tokens=3, draws=draws)
    for found in Engine(Clairvoyant(), drafter, verifier, adaptive=False).generate(PROMPTS, SAMPLED):
        assert found.stats.accepted > 25


@pytest.mark.parametrize("static", [False, True])
def test_a_tiny_llama_looks_ahead(static: bool) -> None:
    target = CausalTarget(tiny_llama(vocabulary=40), static=static)
    for params in (LONG, SAMPLED):
        plain = Engine(target, slots=4, length=80).generate(PROMPTS, params)
        found = Engine(
            target, ParallelTokens(num_speculative_tokens=2), slots=4, length=80, adaptive=False
        ).generate(PROMPTS, params)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert all(g.stats.extra["guesses"] > 20 for g in found)


@pytest.mark.parametrize("target", [CausalTarget(tiny_llama(vocabulary=40)), ToyTarget(vocabulary=40)])
def test_an_id_past_the_vocabulary_is_a_row_of_the_table(target: TargetModel) -> None:
    # With the embeddings of tokens 3 and 7 as the table, their new ids say what the old ones say.
    own = target._embeddings if isinstance(target, ToyTarget) else target.model.get_input_embeddings().weight
    more = target.with_embeddings(own[[3, 7]].detach())
    if isinstance(target, ToyTarget):
        more._habit[40:] = target._habit[[3, 7]]
    answers = []
    for model, first, second in ((target, 3, 7), (more, 40, 41)):
        cache = model.new_cache(slots=2)
        rows = [Rows([5, second, 9, first], (-1, 0, 0, 2)), Rows([first, 2])]
        output = model.forward(cache, Batch.of({cache.allocate(): row for row in rows}))
        answers.append([output.logits_of(slot) for slot in output.spans])
    for old, new in zip(*answers, strict=True):
        torch.testing.assert_close(old, new)
    assert not torch.equal(own[3], own[7])


@pytest.mark.parametrize("target", [CausalTarget(tiny_llama(vocabulary=40)), ToyTarget(vocabulary=40)])
def test_a_table_that_learns_is_read_anew(target: TargetModel) -> None:
    """Changes of the table take effect, as when learning online: in float32, whatever the target's dtype."""
    table = torch.nn.Parameter(torch.ones(2, target.hidden.size))
    more = target.with_embeddings(table)
    answers = []
    for _ in range(2):
        cache = more.new_cache()
        slot = cache.allocate()
        answers.append(more.forward(cache, Batch.of({slot: [5, 40]})).logits_of(slot).clone())
        with torch.no_grad():
            table.copy_(torch.linspace(-1, 1, table.numel()).view_as(table))
    assert torch.equal(answers[0][0], answers[1][0]) and not torch.equal(answers[0][1], answers[1][1])


def test_a_table_of_another_size_is_refused() -> None:
    with pytest.raises(OutpaceError, match=r"\[n, 32\], not \[2, 8\]"):
        CausalTarget(tiny_llama()).with_embeddings(torch.zeros(2, 8))


def test_riders_are_cut_last_come_first_and_stay_riders() -> None:
    draft = Draft([1, 2, 40, 41, 40, 41], [-1, 0, -1, 2, 1, 4], riders=4)
    assert list(draft.guesses.tokens) == [1, 2] and draft.guesses.riders == 0
    cut, kept = trim(draft, 2, 4)
    assert list(kept) == [0, 1, 2, 3] and list(cut.tokens) == [1, 2, 40, 41] and cut.riders == 2
    assert trim(draft, 9, 2)[0].riders == 0


@pytest.mark.parametrize(("path", "places"), [([], [2, 3]), ([0], [4, 5]), ([0, 1], [6])])
def test_it_reads_what_was_said_behind_the_last_accepted_token(path: list[int], places: list[int]) -> None:
    sequence = Sequence([3, 4], LONG, key=None, limit=9)  # type: ignore[arg-type]
    growth, _ = ParallelTokens(num_speculative_tokens=2).prepare(Clairvoyant())
    state = Ahead(sequence, growth, 40)
    draft = Draft([1, 2, 40, 41, 40, 41, 40], [-1, 0, -1, 2, 0, 4, 1], riders=5)
    rows = torch.arange(8.0)[:, None].repeat(1, 3)
    step = Step(draft, range(7), path, [], Logits(rows), 0, sequence, {})
    ParallelTokens(num_speculative_tokens=2).learn(state, step)
    assert [int(row[0]) - 1 for row in state.rows] == places


def test_it_drafts_alone() -> None:
    with pytest.raises(OutpaceError, match="use it by itself"):
        Engine(ToyTarget(), Combined((ParallelTokens(num_speculative_tokens=2),)))
    with pytest.raises(OutpaceError, match="at least 1"):
        ParallelTokens(num_speculative_tokens=0)
    with pytest.raises(OutpaceError, match="'all' or 'root'"):
        ParallelTokens(None, 2, "none")  # type: ignore[arg-type]


def test_a_model_without_embeddings_is_refused() -> None:
    class Deaf(ToyTarget):
        with_embeddings = TargetModel.with_embeddings

    with pytest.raises(UnsupportedModel, match="a Deaf takes no embeddings"):
        Engine(Deaf(), ParallelTokens(num_speculative_tokens=2))


def test_embeddings_are_trained_through_the_target_saved_and_draft(tmp_path: Path) -> None:
    target = CausalTarget(tiny_llama(vocabulary=40))
    plain = Engine(target).generate(PROMPTS, LONG)
    texts = [[*prompt, *g.tokens][:42] for prompt, g in zip(PROMPTS, plain, strict=True)]
    batch = read_batch(target, [[Document(tuple(text))] for text in texts], ())
    before = [weight.clone() for weight in target.model.parameters()]
    made = LookAhead.new(LookAheadConfig(2, places=8), target)
    stood = float(made.accepted(batch).double().mean())
    losses = [float(learnt.total) for learnt in train(made, batch, 60, 0.05)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert float(made.accepted(batch).double().mean()) > stood
    assert all(torch.equal(old, new) for old, new in zip(before, target.model.parameters(), strict=True))
    assert all(weight.grad is None for weight in target.model.parameters())
    made.save(tmp_path)
    drafter = ParallelTokens(str(tmp_path))
    found = Engine(target, drafter, adaptive=False).generate(PROMPTS, LONG)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    # As many as are trained, and fewer where that is said.
    widths = [own.widths for own in (drafter, ParallelTokens(str(tmp_path), 1), ParallelTokens())]
    assert widths == [(8,), (3,), (15,)]
    with pytest.raises(
        OutpaceError, match="there are 2 trained embeddings, too few for num_speculative_tokens=3"
    ):
        Engine(target, ParallelTokens(str(tmp_path), 3))


def test_decoding_accepts_what_the_replay_says() -> None:
    """The replay's prediction holds step by step, and in the counts of a row that contains all texts."""
    target = CausalTarget(tiny_llama(vocabulary=40))
    plain = Engine(target).generate(PROMPTS, LONG)
    texts = [Document((*p, *g.tokens), len(p)) for p, g in zip(PROMPTS, plain, strict=True)]
    batch = read_batch(target, [texts], ())
    made = LookAhead.new(LookAheadConfig(2, places=64), target)
    train(made, batch, 60, 0.05)
    accepted = made.accepted(batch)
    replay = Replay()
    replay.add(batch, accepted)
    steps, first = 0, 0
    for text in texts:
        engine = Engine(target, ParallelTokens(made), adaptive=False)
        sequence = engine.add(text.tokens[: text.prompt], LONG)
        while engine.sequences:
            root, room = len(sequence.tokens) - 1, sequence.room
            engine.step()
            taken = len(sequence.tokens) - 2 - root
            assert taken == min(int(accepted[0, first + root]), room - 1), root
        steps += sequence.stats.steps
        first += len(text.tokens)
    assert (replay.steps, replay.tokens) == (steps, 4 * 41) and replay.expected_length > 1.1
    # A text that begins where a draft would stand: the first step only looks ahead.
    place = next(at for at in range(1, 42) if accepted[0, at] > 0)
    later = made.accepted(read_batch(target, [[Document(texts[0].tokens, place + 1)]], ()))[0]
    assert later[place] == 0 and later[place + 1 :].equal(accepted[0, place + 1 : 42])


def test_nothing_is_guessed_for_the_first_token_of_a_text() -> None:
    target = CausalTarget(tiny_llama(vocabulary=40))
    made = LookAhead.new(LookAheadConfig(2), target)
    before = Document((3, 9, 2))
    batch = read_batch(target, [[before]], ())
    # What is said behind the last place of one text, as if it were the next one's.
    guesses = made.rows(batch, torch.tensor([[2]])).argmax(dim=-1)[0, 0].tolist()
    packed = read_batch(target, [[before, Document((7, *guesses, 5))]], ())
    assert made.rows(packed, torch.tensor([[2]])).argmax(dim=-1)[0, 0].tolist() == guesses
    assert made.accepted(packed)[0, 3] == 0


def test_rows_in_training_are_those_of_decoding() -> None:
    target = CausalTarget(tiny_llama(vocabulary=40))
    made = LookAhead.new(LookAheadConfig(2), target)
    with torch.no_grad():
        made.embeddings.add_(torch.linspace(-1, 1, 64).reshape(2, 32))
    tokens = torch.tensor([[3, 9, 2, 7, 6, 1]])
    batch = TrainingBatch(
        tokens=tokens,
        positions=torch.tensor([[0, 1, 0, 1, 2, 3]]),  # two texts
        documents=torch.tensor([[0, 0, 1, 1, 1, 1]]),
        counted=torch.ones_like(tokens, dtype=torch.bool),
        hidden={},
        scores=torch.zeros(1, 6, 40),
    )
    found = made.rows(batch, torch.tensor([[3, 1, 4]]))[0]
    more = target.with_embeddings(made.embeddings)
    for place, text in enumerate(([2, 7], [3, 9], [2, 7, 6])):
        cache = more.new_cache()
        slot = cache.allocate()
        logits = more.forward(cache, Batch.of({slot: [*text, 40, 41]})).logits_of(slot)
        torch.testing.assert_close(found[place], logits[-2:].clone())

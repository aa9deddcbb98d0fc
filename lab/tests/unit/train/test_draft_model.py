"""A draft model that is trained: its folder, its figures, its own text, and boosting."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaForCausalLM, MistralConfig

from learning import METHODS, new
from models import tiny_llama
from outpace import nano_draft_path, nano_path
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import Target
from outpace.targets.kernel import StockKernel
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.drafters.cascade import Cascade
from outpace_lab.train import data
from outpace_lab.train.data import Document
from outpace_lab.train.distil import answer
from outpace_lab.train.feed import Feed
from outpace_lab.train.loop import Training, train
from outpace_lab.train.metric import evaluate
from outpace_lab.train.modules.draft_model import CheckpointConfig, DraftConfig, TrainedDraft
from outpace_lab.train.objectives import OBJECTIVES, objective
from outpace_lab.train.on_policy import is_on_policy, own_text
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import TrainingBatch
from parts import first

TARGET = Target(tiny_llama(vocabulary=41, context=64))
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
PROMPTS = [Document((token, token + 3, token + 1), 3, open=True) for token in range(1, 30)]
SETTINGS = Training(steps=6, rows=2, learning_rate=0.02, evaluate_every=2)
CONFIG = DraftConfig(hidden_size=16, depth=1, num_speculative_tokens=3)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return answer(TARGET, PROMPTS, GREEDY)


def draft(seed: int = 0, **changes: Any) -> TrainedDraft:
    torch.manual_seed(seed)
    return TrainedDraft.new(replace(CONFIG, **changes), TARGET)


def run(
    documents: list[Document], out: Path, stop: int | None = None, **changes: Any
) -> dict[str, torch.Tensor]:
    """Train; interrupted after the step ``stop``. The weights at the end."""
    module = draft()

    def report(entry: Mapping[str, Any]) -> None:
        if entry["step"] == stop and "loss" in entry:
            raise KeyboardInterrupt

    rows = data.pack(documents, 40)
    train(module, rows[:-2], rows[-2:], replace(SETTINGS, **changes), out, report)
    return dict(module.state_dict())


def test_it_reads_each_document_of_a_row_as_decoding_would(documents: list[Document]) -> None:
    module = draft().double()
    seen: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return objective("ground_truth")(logits, target, labels)

    rows = [documents[:2], documents[2:3]]
    module.loss(read_batch(TARGET, rows, ()), keep)
    plain = [
        module.model(input_ids=torch.tensor([d.tokens])).logits[0, d.prompt - 1 : -1]
        for row in rows
        for d in row
    ]
    assert torch.allclose(seen[0], torch.cat(plain), atol=1e-9)


SMALL = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "sliding_window": 6,
}
OTHERS = {
    "dropout": GPT2Config(vocab_size=41, n_embd=16, n_head=2, n_layer=1, n_positions=64, resid_pdrop=0.3),
    "window": MistralConfig(**SMALL),
    "windows": Gemma3TextConfig(**SMALL, head_dim=8),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_may_be_of_another_family(kind: str, documents: list[Document], tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(OTHERS[kind]).save_pretrained(tmp_path / "start")
    rows = [documents[:2], documents[2:3], documents[3:5]]
    settings = replace(SETTINGS, steps=2, evaluate_every=1, on_policy=0.5)

    def learnt(out: Path, stop: int | None = None) -> TrainedDraft:
        module = TrainedDraft.new(CheckpointConfig(draft=str(tmp_path / "start")), TARGET)

        def report(entry: Mapping[str, Any]) -> None:
            if entry["step"] == stop and "loss" in entry:
                raise KeyboardInterrupt

        train(module, rows, rows, settings, out, report)
        return module.eval().double()

    module = learnt(tmp_path / "whole")
    found = module.writer.read(*_arguments(read_batch(TARGET, rows, ())))
    for row, documents_of_row in zip(found, rows, strict=True):
        plain = [module.model(input_ids=torch.tensor([d.tokens])).logits[0] for d in documents_of_row]
        together = torch.cat(plain)
        assert torch.allclose(row[: len(together)], together, atol=1e-6)
    with pytest.raises(KeyboardInterrupt):
        learnt(tmp_path / "parts", stop=2)
    parts = learnt(tmp_path / "parts").state_dict()
    assert all(torch.equal(weight, parts[name]) for name, weight in module.state_dict().items())


def _arguments(batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    same = batch.documents[:, :, None] == batch.documents[:, None]
    return batch.tokens, batch.positions, same.tril()


@pytest.mark.parametrize("drafted", [0, 25])
def test_its_folder_is_a_transformers_model_that_drafts_as_was_measured(
    drafted: int, documents: list[Document], tmp_path: Path
) -> None:
    rows = data.pack(documents, 40)
    settings = replace(SETTINGS, steps=60, evaluate_every=60, learning_rate=0.01)
    module = draft(hidden_size=48, draft_vocabulary=drafted)
    found = train(module, rows, rows, settings, tmp_path)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), LlamaForCausalLM)
    module = TrainedDraft.load(tmp_path, TARGET)
    module.config = replace(module.config, num_speculative_tokens=3)
    replay, _ = evaluate(module, [read_batch(TARGET, rows, ())], objective("ground_truth"))
    assert replay.expected_length == pytest.approx(found.measured["expected_length"], abs=0.02)
    prompts = [d.tokens[:3] for d in documents]
    for drafter in (DraftModel(str(tmp_path), 3), DraftModel(module.own, 3)):
        generations = Engine(TARGET, drafter, adaptive=False).generate(prompts, GREEDY)
        assert [tuple(g.tokens) for g in generations] == [d.tokens[3:] for d in documents]
        stats = [g.stats for g in generations]
        assert (replay.steps, replay.tokens) == (sum(s.steps for s in stats), sum(s.tokens for s in stats))
        counts = [
            sum(s.accepted_per_position[p] for s in stats if p < len(s.accepted_per_position))
            for p in range(3)
        ]
        assert replay.accepted == counts
    assert replay.expected_length > 1.3


def test_a_checkpoint_is_gone_on_from(documents: list[Document], tmp_path: Path) -> None:
    start = draft(seed=3)
    start.save(tmp_path / "start")
    module = TrainedDraft.new(CheckpointConfig(draft=str(tmp_path / "start")), TARGET)
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), module.parameters(), strict=True))
    assert module.training and all(weight.dtype == torch.float32 for weight in module.parameters())
    rows = data.pack(documents, 40)
    train(module, rows[:-2], rows[-2:], SETTINGS, tmp_path / "out")
    assert not torch.equal(next(start.parameters()), next(module.parameters()))
    again = TrainedDraft.load(tmp_path / "out", TARGET)
    assert again.model.config.hidden_size == 16 and not again.training
    # Where nothing is gained, the checkpoint is kept.
    spoilt = TrainedDraft.new(CheckpointConfig(draft=str(tmp_path / "out")), TARGET)
    train(spoilt, rows, rows, replace(SETTINGS, learning_rate=10.0), tmp_path / "kept")
    kept = TrainedDraft.load(tmp_path / "kept", TARGET)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), kept.parameters(), strict=True))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    draft().save(tmp_path)
    other = Target(tiny_llama(vocabulary=50))
    with pytest.raises(
        OutpaceError, match="has 41 token ids and the target 50; training needs a model with the"
    ):
        TrainedDraft.new(CheckpointConfig(draft=str(tmp_path)), other)
    with pytest.raises(OutpaceError, match="transformers cannot load 'nowhere/at/all'"):
        TrainedDraft.new(CheckpointConfig(draft="nowhere/at/all"), TARGET)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(OutpaceError, match=r"are incomplete; missing are model\.norm\.weight"):
        TrainedDraft.new(CheckpointConfig(draft=str(tmp_path)), TARGET)
    with pytest.raises(OutpaceError, match="a target of the class ToyTarget cannot be trained"):
        ToyTarget().read(*[torch.zeros(1, 1)] * 3)
    with pytest.raises(OutpaceError, match="depth must be at least 1"):
        DraftConfig(depth=0)
    with pytest.raises(OutpaceError, match="a text has 30 tokens, more than the drafter"):
        row = [Document((1,) * 30, 2)]
        train(draft(context=24), [row], [row], SETTINGS, tmp_path / "out")


# -- a part of the vocabulary ----------------------------------------------------------------------------


@pytest.fixture
def part(documents: list[Document], tmp_path: Path) -> Path:
    """The folder of a draft model that drafts 25 of the 41 ids."""
    rows = data.pack(documents, 40)
    settings = replace(SETTINGS, steps=40, evaluate_every=40, learning_rate=0.01)
    train(draft(hidden_size=48, draft_vocabulary=25), rows, rows, settings, tmp_path / "part")
    return tmp_path / "part"


def test_it_drafts_the_ids_that_the_texts_use_most(documents: list[Document], part: Path) -> None:
    answers = torch.tensor([token for d in documents for token in d.tokens[d.prompt :]])
    most = answers.bincount(minlength=41).argsort(descending=True, stable=True)[:25].sort().values
    model = AutoModelForCausalLM.from_pretrained(part)
    assert model.config.draft_vocabulary_ids == most.tolist()
    module = TrainedDraft.load(part, TARGET)
    batch = read_batch(TARGET, [documents[:2]], ())
    at, places = batch.ahead(1).nonzero(as_tuple=True)
    whole = module.own.read(*_arguments(batch))[at, places]
    seen: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.extend((logits, target, labels))
        return objective("ground_truth")(logits, target, labels)

    losses = module.loss(batch, keep)
    labels = batch.tokens[at, places + 1]
    known = torch.isin(labels, most)
    assert 0 < int(known.sum()) < len(known)
    torch.testing.assert_close(seen[0], whole[known][:, most])
    torch.testing.assert_close(seen[1], batch.logits[at, places][known][:, most])
    assert most[seen[2]].tolist() == labels[known].tolist()
    right = (seen[0].argmax(dim=-1) == seen[2]).sum() / len(labels)
    assert float(losses.acceptance[0]) == pytest.approx(float(right))


@pytest.mark.parametrize("branching", first(1, ["", "2x2"]))
@pytest.mark.slow
def test_a_part_of_the_vocabulary_keeps_the_contract(branching: str, part: Path) -> None:
    check_drafter(DraftModel(str(part), 3, branching=branching), TARGET)


def test_going_on_with_a_part_of_the_vocabulary_keeps_its_ids(
    documents: list[Document], part: Path, tmp_path: Path
) -> None:
    module = TrainedDraft.new(CheckpointConfig(draft=str(part)), TARGET)
    rows = data.pack(documents[:4], 40)
    train(module, rows, rows, replace(SETTINGS, steps=2), tmp_path / "further")
    assert module.drafted.part is not None
    before, after = (AutoModelForCausalLM.from_pretrained(place) for place in (part, tmp_path / "further"))
    assert (
        before.config.draft_vocabulary_ids
        == after.config.draft_vocabulary_ids
        == module.drafted.part.tolist()
    )


def accepted(drafter: DraftModel, engine: Engine | None = None, running: int = 3) -> list[int]:
    """Tokens accepted of each draft of a part, all of whose outputs are plain decoding's."""
    prompts = [[1, 4, 2], [6, 9, 7, 3, 5], [8]]
    plain = Engine(TARGET).generate(prompts, GREEDY)
    engine = engine or Engine(TARGET, drafter, adaptive=False, max_running=running)
    found = engine.generate(prompts, GREEDY)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    return [g.stats.accepted for g in found]


def test_a_part_drafts_by_the_weights_that_it_has_now(part: Path) -> None:
    """Its head is a copy of some rows, which learning online changes."""
    learnt, module = TrainedDraft.load(part, TARGET), TrainedDraft.load(part, TARGET)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(weight.flip(0))
    engine = Engine(TARGET, DraftModel(module.own, 3), adaptive=False)
    worse = accepted(DraftModel(module.own, 3), engine)
    with torch.no_grad():
        for own, weight in zip(module.parameters(), learnt.parameters(), strict=True):
            own.copy_(weight)
    better = accepted(DraftModel(module.own, 3), engine)
    assert sum(worse) < sum(better) and better == accepted(DraftModel(learnt.own, 3))


def test_a_part_of_fixed_shapes_drafts_the_same(part: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(part)
    static = DraftModel(Target(model, static=True), 3)
    assert sum(found := accepted(DraftModel(model, 3))) > 0
    assert accepted(static, running=1) == found


def test_a_folder_that_names_all_ids_drafts_all(part: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(part)
    model.config.draft_vocabulary_ids = list(range(41))
    model.save_pretrained(tmp_path / "all")
    module = TrainedDraft.new(CheckpointConfig(draft=str(tmp_path / "all")), TARGET)
    assert module.drafted.part is None and module.writer is module.own


def test_what_a_part_of_the_vocabulary_cannot_do_is_refused(documents: list[Document], part: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(part)
    with pytest.raises(OutpaceError, match="cannot be the model of a cascade; train one without"):
        Engine(TARGET, Cascade(DraftModel(model), PromptLookup()))
    with pytest.raises(OutpaceError, match="leave out vocabulary=intersection"):
        Engine(TARGET, DraftModel(model, vocabulary="intersection"))
    row = [documents[:2]]
    with pytest.raises(OutpaceError, match="leave out on_policy, or train one without draft_vocabulary"):
        train(draft(draft_vocabulary=25), row, row, replace(SETTINGS, on_policy=0.5), part / "out")
    for wrong in ([3, 2], [0, 41], [], [[1, 2]], "all"):
        model.config.draft_vocabulary_ids = wrong
        with pytest.raises(OutpaceError, match="must be ascending ids below 41"):
            Engine(TARGET, DraftModel(model))
    other = AutoModelForCausalLM.from_config(OTHERS["window"]).eval()
    other.config.draft_vocabulary_ids = [1, 2]
    with pytest.raises(OutpaceError, match="of the type llama can draft a part"):
        Engine(TARGET, DraftModel(other))


# -- its own text ----------------------------------------------------------------------------------------


def test_own_text_is_what_it_samples_after_the_prompts(documents: list[Document]) -> None:
    module = draft()
    rows = [documents[:2], [Document(tuple(range(1, 11)))], [Document((4,))]]
    found = own_text(module, rows, 7)
    assert [[d.tokens[: d.prompt] for d in row] for row in found] == [
        [d.tokens[:3] for d in documents[:2]],
        [(1, 2, 3, 4, 5)],
        [()],
    ]
    assert all(
        len(a.tokens) <= len(b.tokens)
        for x, y in zip(found, rows, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert found[2] == rows[2] and found[0][0].tokens[3:] != documents[0].tokens[3:]
    assert found == own_text(module, rows, 7) != own_text(module, rows, 8)
    assert module.training
    # A draft model with the target's weights says what the target would.
    greedy = TrainedDraft(CONFIG, module.fit, tiny_llama(vocabulary=41, context=64))
    greedy.bind(TARGET)
    head: Any = greedy.model.get_output_embeddings()
    head.weight.data.mul_(1e4)
    ends = [d for d in documents if 0 not in d.tokens[3:]][:3]
    assert own_text(greedy, [ends], 1) == [ends]


def test_own_text_is_learnt_from_the_target_alone(documents: list[Document]) -> None:
    batch = read_batch(TARGET, [documents[:2]], ())
    own = replace(batch, sampled=True)
    assert batch.labels[0, :5].tolist() == batch.tokens[0, 1:6].tolist()
    assert torch.equal(own.labels, batch.logits.argmax(dim=-1))
    wrong = replace(own, tokens=batch.tokens.flip(1))
    labels: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, target: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        labels.append(found)
        return objective("ground_truth")(logits, target, found)

    draft().loss(wrong, keep)
    assert torch.equal(labels[0], batch.logits.argmax(dim=-1)[batch.ahead(1)])


def test_each_forward_and_each_process_has_its_own_text(documents: list[Document]) -> None:
    module = draft()
    rows = [[document] for document in documents[:4]]
    feed = Feed(module, rows, together=4, seed=1, on_policy=0.5)
    batches = [feed.batch(forward) for forward in range(4)]
    assert [batch.sampled for batch in batches] == [False, True, False, True]
    assert torch.equal(feed.batch(1).tokens, batches[1].tokens)
    one = Feed(module, rows[:1], together=1, seed=1, on_policy=1.0)
    assert not torch.equal(one.batch(0).tokens, one.batch(1).tokens)
    assert sorted(batches[0].tokens.tolist()) == sorted(list(d.tokens) for d in documents[:4])
    shares = [Feed(module, rows, 2, 1, process=process, processes=2).batch(0) for process in range(2)]
    shared = [row for share in shares for row in share.tokens.tolist()]
    assert sorted(shared) == sorted(batches[0].tokens.tolist())
    same = [[documents[0]]] * 4
    own = [Feed(module, same, 2, 1, 1.0, process=process, processes=2).batch(0) for process in range(2)]
    assert len({tuple(row) for share in own for row in share.tokens.tolist()}) == 4


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.25, 5), (0.5, 10), (0.3, 6), (1.0, 20)])
def test_the_fraction_is_kept_evenly(fraction: float, count: int) -> None:
    turns = [is_on_policy(forward, fraction) for forward in range(20)]
    assert sum(turns) == count
    assert fraction != 0.5 or turns[:4] == [False, True, False, True]


@pytest.mark.parametrize("name", first(2, OBJECTIVES))
def test_every_objective_learns_on_policy(name: str, documents: list[Document], tmp_path: Path) -> None:
    module = draft()
    rows = data.pack(documents, 40)
    entries: list[Mapping[str, Any]] = []
    settings = replace(SETTINGS, steps=12, evaluate_every=12, objective=name, on_policy=1.0)
    _, loss = evaluate(draft(), [read_batch(TARGET, rows, ())], objective(name))
    train(module, rows, rows[:4], settings, tmp_path, entries.append)
    _, less = evaluate(module.eval(), [read_batch(TARGET, rows, ())], objective(name))
    assert less < loss * 0.98
    assert {entry["on_policy"] for entry in entries if "loss" in entry} == {1.0}


def test_an_interrupted_run_on_policy_ends_with_the_same_weights(
    documents: list[Document], tmp_path: Path
) -> None:
    changes = {"on_policy": 0.5, "objective": "forward_kl", "accumulate": 2}
    whole = run(documents, tmp_path / "whole", **changes)
    for stop in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            run(documents, tmp_path / "parts", stop, **changes)
    parts = run(documents, tmp_path / "parts", **changes)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert (tmp_path / "whole/log.jsonl").read_text() == (tmp_path / "parts/log.jsonl").read_text()
    off = run(documents, tmp_path / "off", **{**changes, "on_policy": 0.0})
    assert any(not torch.equal(whole[name], off[name]) for name in whole)
    with pytest.raises(OutpaceError, match="belongs to a run with other settings"):
        run(documents, tmp_path / "parts", **{**changes, "on_policy": 0.25})


def test_drafters_without_text_of_their_own_are_refused(documents: list[Document], tmp_path: Path) -> None:
    rows = data.pack(documents, 40)
    for method in {*METHODS} - {"draft_model"}:
        module = new(method, Target(tiny_llama(vocabulary=41, layers=3)))
        with pytest.raises(OutpaceError, match=f"{method} drafts from the target's states"):
            train(module, rows, rows, replace(SETTINGS, on_policy=0.5), tmp_path)
    with pytest.raises(OutpaceError, match="on_policy must be a fraction from 0 to 1"):
        replace(SETTINGS, on_policy=1.5)


class Sealed(StockKernel):
    """A kernel whose packed weights cannot be copied, as oneDNN's."""

    copies = True

    class Weights:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __deepcopy__(self, memo: Any) -> Any:
            raise NotImplementedError("packed weights cannot be copied")

    def pack(self, weight: torch.Tensor) -> Any:
        return self.Weights(weight)

    def multiply(self, rows: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return super().multiply(rows, packed.tensor, bias)


def test_a_copy_of_a_packed_draft_model_decodes_by_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.targets.cpu.linear.COMPILED", Sealed())
    model = AutoModelForCausalLM.from_pretrained(nano_path(), dtype=torch.bfloat16).eval()
    module = TrainedDraft.load(nano_draft_path(), Target(model, plan="stock"))
    assert module.writer.model is module.model and module.writer.plan.packed
    copied = copy.deepcopy(module, {id(module.target): module.target})
    assert copied.model is not module.model and copied.writer.model is copied.model

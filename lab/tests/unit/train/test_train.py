"""Training: what the target reads, what is learnt, what replay predicts, and runs that are interrupted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from learning import METHODS, Letters, new
from learning import train as learn
from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.heads.medusa import Medusa, MedusaConfig
from outpace.engine.engine import Engine
from outpace.targets import Target
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget
from outpace_lab.train import data
from outpace_lab.train.data import Document
from outpace_lab.train.distil import answer
from outpace_lab.train.loop import Training, train
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.metric import evaluate
from outpace_lab.train.modules.heads import TrainedMedusa
from outpace_lab.train.objectives import OBJECTIVES, objective
from outpace_lab.train.reading import read_batch

TARGET = ToyTarget()
GREEDY = SamplingParams(max_new_tokens=30, ignore_eos=True)
PROMPTS = [Document((token, token + 3, token + 1), 3, open=True) for token in range(1, 25)]
SETTINGS = Training(steps=8, rows=2, accumulate=2, learning_rate=0.01, evaluate_every=2)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return answer(TARGET, PROMPTS, GREEDY)


def heads() -> TrainedMedusa:
    torch.manual_seed(0)
    return TrainedMedusa.new(MedusaConfig(heads=3, own_head=True, max_nodes=6), TARGET)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    rows = [[Document((5, 6, 7), 1), Document((3, 9), 0)], [Document((8, 2, 4, 1), 2)]]
    batch = read_batch(TARGET, rows, (-1, 1))
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.counted.int().tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 1, 0]]
    for row, first, text in ((0, 0, [5, 6, 7]), (0, 3, [3, 9]), (1, 0, [8, 2, 4, 1])):
        cache = TARGET.new_cache()
        slot = cache.allocate()
        plain = TARGET.forward(cache, Batch.of({slot: text}), (-1, 1))
        places = slice(first, first + len(text))
        assert batch.tokens[row, places].tolist() == text
        assert plain.logits is not None and torch.allclose(batch.logits[row, places], plain.logits)
        for layer in (-1, 1):
            assert torch.allclose(batch.hidden[layer][row, places], plain.hidden[slot][layer])
    assert not batch.logits.is_inference() and not batch.hidden[-1].is_inference()


def test_answers_are_those_of_plain_decoding(documents: list[Document]) -> None:
    plain = Engine(TARGET).generate([prompt.tokens for prompt in PROMPTS], GREEDY)
    assert [d.tokens[3:] for d in documents] == [tuple(g.tokens) for g in plain]
    assert all(d.prompt == 3 and not d.open for d in documents)
    sampled = replace(GREEDY, temperature=1.0, seed=2**64 - 2)
    (one, _, other) = answer(TARGET, [PROMPTS[0]] * 3, sampled, together=2)
    assert one != other


def test_replay_counts_the_steps_of_decoding(documents: list[Document]) -> None:
    module = heads().double()
    learn(module, read_batch(TARGET, [documents[:2], documents[2:4]], (-1,)), 60, 0.01)
    # The first step is plain, so drafts begin after the first token of each answer.
    later = [replace(document, prompt=document.prompt + 1) for document in documents[:4]]
    replay, _ = evaluate(
        module, [read_batch(TARGET, [later[:2], later[2:]], (-1,))], objective("ground_truth")
    )
    stats = [
        Engine(TARGET, Medusa(module), adaptive=False).generate([d.tokens[: d.prompt]], GREEDY)[0].stats
        for d in documents[:4]
    ]
    assert replay.steps + 4 == sum(s.steps for s in stats)
    assert replay.tokens + 4 == sum(s.tokens for s in stats)
    counts = [
        sum(s.accepted_per_position[p] for s in stats if p < len(s.accepted_per_position)) for p in range(3)
    ]
    assert replay.accepted == [count for count in counts if count] and len(replay.accepted) > 1
    assert 1.2 < replay.expected_length < 4


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_are_what_they_say(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    draft, target = torch.randn(2, 3, 5, generator=random).unbind()
    labels = torch.tensor([0, 4, 2])
    found = objective(name)(draft, target, labels).tolist()
    for place in range(3):
        p, q = draft[place].softmax(-1).tolist(), target[place].softmax(-1).tolist()
        pairs = list(zip(p, q, strict=True))
        expected = {
            "ground_truth": -math.log(p[labels[place]]),
            "forward_kl": sum(b * math.log(b / a) for a, b in pairs),
            "reverse_kl": sum(a * math.log(a / b) for a, b in pairs),
            "jensen_shannon": sum(
                a * math.log(2 * a / (a + b)) / 2 + b * math.log(2 * b / (a + b)) / 2 for a, b in pairs
            ),
            "total_variation": sum(max(b - a, 0) for a, b in pairs),
        }[name]
        assert found[place] == pytest.approx(expected, abs=1e-5)
    if name != "ground_truth":
        assert objective(name)(draft, draft, labels).abs().max() < 1e-6


def run(
    documents: list[Document],
    out: Path,
    stop: int | None = None,
    steps_seen: list[int] | None = None,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Train; interrupted after the step ``stop``. The weights at the end."""
    module = heads()

    def report(entry: Mapping[str, Any]) -> None:
        if steps_seen is not None:
            steps_seen.append(entry["step"])
        if entry["step"] == stop and "loss" in entry:
            raise KeyboardInterrupt

    rows = data.pack(documents, 70)
    train(module, rows[:-3], rows[-2:], replace(SETTINGS, **changes), out, report, calibration=rows[-3:-2])
    return module.state_dict()


def test_an_interrupted_run_ends_with_the_same_weights(documents: list[Document], tmp_path: Path) -> None:
    whole = run(documents, tmp_path / "whole")
    for stop in (5, 7):
        with pytest.raises(KeyboardInterrupt):
            run(documents, tmp_path / "parts", stop)
    parts = run(documents, tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1]
    entries = [json.loads(line) for line in logs[0].splitlines()]
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(1, 9))
    measured = [entry for entry in entries if "expected_length" in entry]
    assert len(measured) == 5 and min(entry["expected_length"] for entry in measured) >= 1
    assert measured[-1]["held_out_loss"] < measured[0]["held_out_loss"]
    best = TrainedMedusa.load(tmp_path / "whole", TARGET)
    assert len(best.tree()) == 6
    with pytest.raises(OutpaceError, match="belongs to a run with other settings"):
        run(documents, tmp_path / "parts", learning_rate=0.5)


def test_heads_are_measured_on_neither_learnt_nor_held_out_text(
    documents: list[Document], tmp_path: Path
) -> None:
    rows = data.pack(documents, 70)
    found = []
    for held_out, calibration in ((rows[-2:], rows[:3]), (rows[-4:-2], rows[:3]), (rows[-2:], rows[3:6])):
        module = heads()
        settings = replace(SETTINGS, steps=1)
        train(module, rows[6:8], held_out, settings, tmp_path / str(len(found)), calibration=calibration)
        found.append(module.accuracies)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    with pytest.raises(OutpaceError, match="there is no text to measure the heads on"):
        train(heads(), rows[6:8], rows[-2:], settings, tmp_path / "none")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_trained_and_goes_on_where_it_was(method: str, tmp_path: Path) -> None:
    target = Target(tiny_llama(dtype=torch.float32, layers=3))
    rows = [[Document(tuple((7 * place + row) % 90 + 1 for place in range(20)), 3)] for row in range(7)]
    settings = Training(steps=3, rows=2, evaluate_every=1, learning_rate=0.01)

    def weights(out: Path, stop: int | None = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = new(method, target)

        def report(entry: Mapping[str, Any]) -> None:
            if entry["step"] == stop:
                raise KeyboardInterrupt

        progress = train(module, rows[3:], rows[:2], settings, out, report, calibration=rows[2:3])
        assert progress.best >= 1 and math.isfinite(progress.measured["held_out_loss"])
        return dict(module.state_dict())

    torch.manual_seed(0)
    before = dict(new(method, target).state_dict())
    whole = weights(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        weights(tmp_path / "parts", stop=2)
    parts = weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert any(not torch.equal(whole[name], before[name]) for name in whole)
    loaded = LEARNED[method].load(tmp_path / "whole", target).state_dict()
    assert {name: weight.shape for name, weight in loaded.items()} == {
        name: weight.shape for name, weight in before.items()
    }


def test_training_stops_when_nothing_is_gained(documents: list[Document], tmp_path: Path) -> None:
    run(documents, tmp_path, learning_rate=1e-12, patience=1)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 2]


@pytest.mark.parametrize("method", ["draft_model", "medusa"])
def test_forwards_in_bfloat16_leave_weights_and_the_target_as_they_are(method: str, tmp_path: Path) -> None:
    model = tiny_llama(dtype=torch.float32)
    target, cls = Target(model), LEARNED[method]
    theirs = _dtypes([model.model.layers[0].mlp.up_proj])
    rows = [[Document(tuple((7 * place + row) % 90 + 1 for place in range(20)), 3)] for row in range(4)]
    settings = Training(steps=2, rows=2, evaluate_every=2, on_policy=float(method == "draft_model"))
    found = []
    for place, bf16 in enumerate((False, True, False)):
        torch.manual_seed(0)
        module = cls.new(cls.config_type(), target)
        own = _dtypes([part for part in module.modules() if isinstance(part, torch.nn.Linear)])
        more = replace(settings, bf16=bf16)
        train(module, rows, rows[:2], more, tmp_path / str(place), calibration=rows[2:])
        assert (torch.bfloat16 in own) == bf16 and theirs == {torch.float32}
        assert all(weight.dtype == torch.float32 for weight in module.parameters())
        found.append(module.state_dict())
    plain, rounded, again = found
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert any(not torch.equal(plain[name], rounded[name]) for name in plain)
    assert all(torch.allclose(plain[name], rounded[name], atol=0.02) for name in plain)


def _dtypes(modules: list[torch.nn.Module]) -> set[torch.dtype]:
    """Those that come out of some modules from now on."""
    seen: set[torch.dtype] = set()
    for module in modules:
        module.register_forward_hook(lambda _, given, out: seen.add(out.dtype))
    return seen


def test_texts_that_cannot_be_learnt_are_refused(documents: list[Document], tmp_path: Path) -> None:
    rows = data.pack(documents, 70)
    prompts = data.pack(documents, 3)
    other = [[Document((1, TARGET.vocabulary), 1)]]
    for learnt, held_out, match in (
        (prompts, rows, "there is nothing to learn: no text is longer than its prompt"),
        (rows, prompts, "there is nothing to measure on"),
        (other, rows, f"from . to {TARGET.vocabulary}, and the target has {TARGET.vocabulary}"),
        (rows, other, "give texts tokenized for the target"),
    ):
        with pytest.raises(OutpaceError, match=match):
            train(heads(), learnt, held_out, SETTINGS, tmp_path, calibration=rows[:2])
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_outlives_the_writing_of_the_next(documents: list[Document], tmp_path: Path) -> None:
    whole = run(documents, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(documents, tmp_path / "parts", stop=5)
    checkpoint = tmp_path / "parts" / "checkpoint"
    # As it is between the two renamings, and with an entry of the log cut short.
    checkpoint.rename(checkpoint.with_name("checkpoint.old"))
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:
        log.write('{"step": 3, "lo')
    seen: list[int] = []
    parts = run(documents, tmp_path / "parts", steps_seen=seen)
    assert seen[0] == 5 and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert (tmp_path / "whole/log.jsonl").read_text() == (tmp_path / "parts/log.jsonl").read_text()
    assert not checkpoint.with_name("checkpoint.old").exists()


def test_a_run_goes_on_with_the_same_texts_alone(documents: list[Document], tmp_path: Path) -> None:
    run(documents, tmp_path)
    changed = [replace(d, tokens=(*d.tokens[:-1], (d.tokens[-1] + 1) % TARGET.vocabulary)) for d in documents]
    with pytest.raises(OutpaceError, match="belongs to a run with other texts"):
        run(changed, tmp_path)


def test_seconds_are_those_of_all_runs_that_went_on(documents: list[Document], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(documents, tmp_path, stop=5)
    file = tmp_path / "checkpoint" / "progress.json"
    held = json.loads(file.read_text())
    assert held["progress"]["seconds"] > 0 < held["progress"]["cpu_seconds"]
    held["progress"] |= {"seconds": 1e6, "cpu_seconds": 2e6}
    file.write_text(json.dumps(held))
    run(documents, tmp_path)
    progress = json.loads(file.read_text())["progress"]
    assert 1e6 < progress["seconds"] < 1.1e6 and 2e6 < progress["cpu_seconds"] < 2.1e6


@pytest.mark.parametrize("wrong", ["loss", "weights"])
def test_a_loss_that_is_no_number_ends_the_run(
    wrong: str, documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(documents, tmp_path / "whole")
    forwards = 0

    def loss(module: TrainedMedusa, *given: Any) -> Any:
        nonlocal forwards
        found = right(module, *given)
        forwards += module.training
        if forwards != 2 * SETTINGS.accumulate + 1:
            return found
        if wrong == "loss":
            return replace(found, total=found.total * math.nan)
        # A gradient that is none, of a loss that is.
        return replace(found, total=found.total + (0 * next(module.parameters())).abs().sqrt().sum())

    right = TrainedMedusa.loss
    monkeypatch.setattr(TrainedMedusa, "loss", loss)
    match = {"loss": "at step 3 the loss is nan.*another folder", "weights": "at step . the .*loss is nan"}
    with pytest.raises(OutpaceError, match=match[wrong]):
        run(documents, tmp_path / "parts")
    log = (tmp_path / "parts" / "log.jsonl").read_text()
    assert "NaN" not in log and json.loads(log.splitlines()[-1])["step"] in (2, 3)
    monkeypatch.undo()
    parts = run(documents, tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_module_stays_on_the_device_of_its_target(
    documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would place it elsewhere, as for a target on a GPU that is not the first."""
    monkeypatch.setattr(accelerate.Accelerator, "device", torch.device("meta"))
    module, rows = heads(), data.pack(documents, 70)
    train(module, rows[3:], rows[:2], replace(SETTINGS, steps=2), tmp_path, calibration=rows[2:3])
    assert all(weight.device == TARGET.hidden.device for weight in module.parameters())


def test_settings_that_make_no_sense_are_refused() -> None:
    for changes, match in (
        ({"steps": 0}, "steps"),
        ({"objective": "none"}, "There are: ground_truth"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0"),
        ({"learning_rate": math.inf}, "learning_rate must be above 0"),
    ):
        with pytest.raises(OutpaceError, match=match):
            replace(SETTINGS, **changes)  # type: ignore[arg-type]


def test_every_kind_of_line_is_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    lines: list[Any] = [
        "xy",
        {"text": "z"},
        {"prompt": "p"},
        {"question": "p", "answer": "rs"},
        {"messages": chat},
        {"messages": chat[:1]},
        {"tokens": [7, 8, 9], "prompt_length": 2},
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    found = data.read(tmp_path, Letters())
    texts = [("xy", 0, True), ("z", 0, True)]
    assert found[:2] == [Document((1, *map(ord, text)), prompt) for text, prompt, _ in texts]
    assert found[2] == Document((1, ord("p")), 2, open=True)
    assert found[3] == Document((1, *map(ord, "prs")), 2)
    assert found[4] == Document(tuple(map(ord, "uqar")), 3)
    assert found[5] == Document(tuple(map(ord, "uqa")), 3, open=True)
    assert found[6] == Document((7, 8, 9), 2)
    assert data.read(tmp_path, Letters(), chat=True)[2].tokens == tuple(map(ord, "upa"))
    data.write(found, tmp_path / "again.jsonl")
    again = data.read(tmp_path / "again.jsonl", Letters())
    assert [(d.tokens, d.prompt) for d in again] == [(d.tokens, d.prompt) for d in found]
    assert data.digest(again) == data.digest(found) != data.digest(found[::-1])


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "line 1: not JSON"),
        (r'{"text": "\ud800"}', r"line 1: '\\ud800' is an unpaired surrogate"),
        ("3", "line 1: neither a string nor an object"),
        ('{"words": "x"}', 'no "text"'),
        ('{"text": 3}', '"text" is not a string'),
        ('{"tokens": ["x"]}', "not a list of token ids"),
        ('{"tokens": []}', "the text is empty"),
        ('{"tokens": [1], "prompt_length": "x"}', '"prompt_length" is not a number from 0 to 1'),
        ('{"tokens": [1], "prompt_length": 2}', '"prompt_length" is not a number from 0 to 1'),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no turn before the answer"),
        ('{"messages": ["x"]}', '"messages" is not'),
        ("", "there is no document"),
    ],
)
def test_lines_that_cannot_be_read_are_named(line: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(OutpaceError, match=match):
        data.read(tmp_path, Letters())


def test_what_is_held_out_does_not_depend_on_the_rest() -> None:
    documents = [Document((place, 1, 2), 1) for place in range(400)]
    parts = data.split(documents, 0.2)
    held, rest = parts.held_out, parts.calibration
    assert 50 < len(held) < 110 and 25 < len(rest) < 55
    assert {*parts.learnt, *rest, *held} == set(documents)
    assert len(parts.learnt) + len(rest) + len(held) == 400
    third = data.split(documents[::3], 0.2)
    assert set(third.held_out) == set(held) & set(documents[::3])
    assert set(third.calibration) == set(rest) & set(documents[::3])
    # Answers to one prompt stay together.
    assert set(data.split([replace(d, tokens=(*d.tokens, 3)) for d in documents], 0.2).held_out) == {
        replace(d, tokens=(*d.tokens, 3)) for d in held
    }
    with pytest.raises(OutpaceError, match="one part is empty"):
        data.split(documents[:3], 0.0)


def test_rows_are_filled_and_long_answers_cut() -> None:
    documents = [Document((1,) * size, 1) for size in [5, 3, 2, 9, 4]]
    rows = data.pack(documents, 6)
    assert [[len(d.tokens) for d in row] for row in rows] == [[5], [3, 2], [6], [4]]
    # A prompt that leaves its answer no room is nothing to learn from.
    long = [Document(tuple(range(9)), 6), Document(tuple(range(9)), 7), Document((1, 2), 2)]
    assert data.pack(long, 6) == [] and data.lost([*documents, *long], 6) == [3, 3, 2]


@pytest.mark.parametrize("size", [12, 13, 14, 29])
def test_long_texts_are_learnt_to_their_end(size: int) -> None:
    text = Document(tuple(range(size)))
    rows = data.pack([text, Document((7, 8))], 6)
    assert all(sum(len(d.tokens) for d in row) <= 6 for row in rows)
    pieces = [d.tokens for row in rows for d in row if d.tokens != (7, 8)]
    # A last token alone has nothing before it that it could be learnt from.
    whole = size - 1 if size % 6 == 1 else size
    assert [token for piece in pieces for token in piece] == list(range(whole))
    assert data.lost([text], 6) == [] and all(d.prompt == 0 for row in rows for d in row)

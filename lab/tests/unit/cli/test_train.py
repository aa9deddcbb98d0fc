"""``outpace train`` from a user's point of view."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.cli import app
from outpace.core import OutpaceError, SamplingParams
from outpace.loading import Loaded, load
from outpace.targets.weights.adapters import base_of
from outpace_lab.cli import train_answers as answers
from outpace_lab.train import distil
from outpace_lab.train.data import Document, read, split
from outpace_lab.train.metric import Replay
from outpace_lab.train.modules.heads import TrainedMedusa
from outpace_lab.train.reading import read_batch

Run = Callable[..., Any]
SMALL = ["--steps", 6, "--evaluate-every", 3, "--rows", 2, "--length", 40, "--held-out", 0.3]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Run:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "100")
    prompts = "".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(20))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    data = ["--data", tmp_path / "prompts.jsonl", "-m", folder, "--device", "cpu", "-n", 20]
    return lambda method, *more: CliRunner().invoke(app, ["train", method, *map(str, [*data, *more])])


def test_a_drafter_is_trained_and_drafts(run: Run, model: Loaded, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    result = run("medusa:heads=2,max_nodes=4", *SMALL, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    parts = [found[f"{kind}documents"] for kind in ("", "calibration_", "held_out_")]
    assert sum(parts) == 20 and min(parts) > 0 and found["steps"] == 6
    assert found["expected_length"] >= 1 and found["parameters"] == 2 * (32 * 32 + 32)
    # 6 steps of 2 rows, each at most 40 tokens long and more than half full.
    assert 6 * 2 * 20 < found["tokens_seen"] <= 6 * 2 * 40 and found["cpu_seconds"] > 0
    facts = json.loads((out / "provenance.json").read_text())
    assert facts["result"]["expected_length"] == found["expected_length"]
    assert len(facts["data"]["sha256"]) == 64 and {"torch", "peft", "datasets"} <= set(facts["versions"])
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    params = SamplingParams(max_new_tokens=20)
    (plain,) = model.engine().generate([model.encode("say 0")], params)
    assert answers[0]["tokens"][answers[0]["prompt_length"] :] == plain.tokens
    (fast,) = model.engine(f"medusa:path={out}", adaptive=False).generate([model.encode("say 0")], params)
    assert fast.tokens == plain.tokens and fast.stats.drafted > 0
    # The same command again finds the answers and the finished run, and leaves it as it is.
    written = (out / "provenance.json").read_bytes()
    again = run("medusa:heads=2,max_nodes=4", *SMALL, "--out", out, "--json")
    assert json.loads(again.stdout) == found and "finished already" in again.stderr
    assert (out / "provenance.json").read_bytes() == written
    other = run("medusa:heads=2,max_nodes=4", *SMALL, "--out", out, "-n", 10)
    assert other.exit_code == 2 and "or with other options; give another --out" in " ".join(
        other.stderr.split()
    )


def test_what_others_wrote_is_measured_on_what_the_model_says(
    run: Run, model: Loaded, tmp_path: Path
) -> None:
    """The held-out figure is that of decoding, whatever text is learnt; and all of a long text is learnt."""
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    asked = [{"prompt": f"say {number}", "response": "no " * (number + 1)} for number in range(20)]
    texts = [{"text": f"{number} tells a tale " + "of a day " * number} for number in range(20)]
    data.write_text("".join(json.dumps(line) + "\n" for line in [*asked, *texts]))
    result = run("medusa:heads=2,max_nodes=4", *SMALL, "--data", data, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    documents = read(data, model)
    parts = split(documents, 0.3)
    assert found["held_out_documents"] == len(parts.held_out)
    answered = [json.loads(line) for line in (out / "held_out.jsonl").read_text().splitlines()]
    prompts = [line["tokens"][: line["prompt_length"]] for line in answered]
    params = SamplingParams(max_new_tokens=20)
    plain = model.engine().generate(prompts, params)
    assert [line["tokens"][line["prompt_length"] :] for line in answered] == [g.tokens for g in plain]
    held_out = [tuple(d.tokens[: d.prompt]) for d in parts.held_out if d.prompt]
    assert {*held_out} < {*map(tuple, prompts)} and not (out / "answers.jsonl").exists()
    # What fits a row whole is decoded as it was measured.
    assert max(map(len, prompts)) + 20 <= 40
    # As of decoding (test_replay_counts_the_steps_of_decoding), with drafts from the prompt's last token on.
    heads = TrainedMedusa.load(out, model.target)
    rows = [[Document(tuple(line["tokens"]), line["prompt_length"])] for line in answered]
    replay = Replay()
    batch = read_batch(model.target, rows, heads.hidden_layers)
    replay.add(batch, heads.accepted(batch))
    assert found["expected_length"] == pytest.approx(replay.expected_length) and replay.expected_length > 1
    assert found["measured_on"] == "the target's own text at temperature 0"
    # What is learnt is all of the texts, and of an answer what fits.
    whole = sum(len(d.tokens) for d in parts.learnt)
    single = sum(not d.prompt and len(d.tokens) % 40 == 1 for d in parts.learnt)
    too_long = [len(d.tokens) - 40 for d in parts.learnt if d.prompt and len(d.tokens) > 40]
    assert max(len(d.tokens) for d in parts.learnt if not d.prompt) > 80 and len(too_long) > 1
    assert found["tokens"] == whole - single - sum(too_long)
    assert (found["cut_documents"], found["cut_tokens"]) == (len(too_long), sum(too_long))
    assert f"{len(too_long)} answers do not fit into --length 40" in result.stderr


def test_a_model_is_trained_too_and_decodes(run: Run, folder: Path, model: Loaded, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "heads"
    more = ["--tune", "lora:rank=2,weight=0.1,warmup=0,rate=1", "--learning-rate", 0.1, "--out", out]
    result = run("medusa:heads=2,max_nodes=4", *SMALL, *more, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["method"] == "medusa" and found["target_loss"] > -1e-6 and found["target_agreement"] <= 1
    tuned = load(found["tuned_model"], device="cpu")
    assert tuned.name == str(out / "target") and tuned.tokenizer("say").input_ids
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    prompts = [tuned.encode(f"say {number}") for number in range(4)]
    plain = [g.tokens for g in tuned.engine().generate(prompts, params)]
    fast = tuned.engine(f"medusa:path={out}", adaptive=False).generate(prompts, params)
    assert [g.tokens for g in fast] == plain
    # Updates of a model that was tuned already are of that one.
    twice = run("medusa:heads=2", *SMALL, *more[:-1], tmp_path / "more", "-m", out / "target", "--json")
    assert twice.exit_code == 0, twice.output
    assert base_of(tmp_path / "more" / "target") == str(out / "target")
    assert load(str(tmp_path / "more" / "target"), device="cpu").target.vocabulary == tuned.target.vocabulary
    facts = json.loads((out / "target" / "adapter_config.json").read_text())
    moved = json.dumps(facts | {"base_model_name_or_path": "/nowhere/at/all"})
    (out / "target" / "adapter_config.json").write_text(moved)
    with pytest.raises(OutpaceError, match=r"no such folder: /nowhere/at/all\. If that model has moved"):
        load(str(out / "target"), device="cpu")


def test_draft_models_are_trained_one_after_another(run: Run, model: Loaded, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    own = ["--objective", "total_variation", "--on-policy", 0.5]
    result = run("draft_model:hidden_size=16,depth=1", *SMALL, *own, "--out", first, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["method"] == "draft_model" and "Removed shared" not in result.stderr
    assert (first / "tokenizer.json").is_file() and (first / "generation_config.json").is_file()
    log = [json.loads(line) for line in (first / "log.jsonl").read_text().splitlines()]
    assert [entry["on_policy"] for entry in log if "loss" in entry] == [0, 1] * 3
    # The answers of one run are data for the next.
    more = ["--data", first / "answers.jsonl", "--draft", first, "--out", second, "--json"]
    result = run("draft_model", *SMALL, *more)
    assert result.exit_code == 0, result.output
    facts = json.loads((second / "provenance.json").read_text())
    assert facts["config"]["draft"] == str(first) and not (second / "answers.jsonl").exists()
    more = ["--data", first / "answers.jsonl", "--boost-after", f"{first},{second}", "--out", third, "--json"]
    result = run("draft_model:hidden_size=16,depth=1", *SMALL, *more)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["expected_length"] >= found["earlier_expected_length"] >= 1
    assert json.loads((third / "provenance.json").read_text())["boost_after"] == [str(first), str(second)]
    params = SamplingParams(max_new_tokens=20)
    (plain,) = model.engine().generate([model.encode("say 0")], params)
    spec = f"combined:(draft_model:model={second})+(draft_model:model={third})"
    (fast,) = model.engine(spec, adaptive=False).generate([model.encode("say 0")], params)
    assert fast.tokens == plain.tokens and fast.stats.drafted > 0
    result = run("draft_model", *SMALL, "--draft", first, "--out", first)
    assert result.exit_code == 2 and "would be overwritten" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("medusa:heads=2", ("--held-out", 0.001), "one part is empty; give more documents"),
        (
            "medusa:heads=2",
            ("--held-out", 0.2),
            "there are none to measure the heads on",
        ),
        ("medusa:heads=2", ("--on-policy", 0.5), "so it cannot write its own text"),
        ("draft_model:context=20", (), "may have 25 tokens, more than the drafter's context of 20"),
        ("draft_model", ("--data", "TOKENS"), "ids from 1 to 99999, and the target has"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_prompt_is_answered(
    run: Run, method: str, options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "answer", None)
    few, tokens = tmp_path / "few.jsonl", tmp_path / "tokens.jsonl"
    few.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(6)), "utf-8")
    tokens.write_text(json.dumps({"tokens": [1, 99999], "prompt_length": 2}) + "\n", "utf-8")
    options = [tokens if option == "TOKENS" else option for option in options]
    result = run(method, *SMALL, "--data", few, "--distil", "--out", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split()), result.output


def test_answers_are_gone_on_with_where_they_were_interrupted(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(answers, "_TOGETHER", 6)
    own = [*SMALL, "--temperature", 1.0, "--json"]
    whole = run("medusa:heads=2,max_nodes=4", *own, "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    asked: list[int] = []

    def answer(target: Any, prompts: Any, params: SamplingParams) -> Any:
        asked.append(len(prompts))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return distil.answer(target, prompts, params)

    monkeypatch.setattr(answers, "answer", answer)
    stopped = run("medusa:heads=2,max_nodes=4", *own, "--out", tmp_path / "parts")
    assert stopped.exit_code == 130 and "repeat the command to resume" in stopped.stderr
    file = tmp_path / "parts" / "answers.jsonl"
    assert len(file.read_text().splitlines()) == 12
    # What was written after the last note is made anew.
    file.write_text(file.read_text() + '{"tokens": [1], "prompt')
    note = tmp_path / "parts" / "answers.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"seconds": 1e6}))
    result = run("medusa:heads=2,max_nodes=4", *own, "--out", tmp_path / "parts")
    assert result.exit_code == 0, result.output
    assert 1e6 < json.loads(result.stdout)["answering_seconds"] < 1.1e6
    assert asked == [6, 6, 6, 6, 2]
    assert file.read_bytes() == (tmp_path / "whole" / "answers.jsonl").read_bytes()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_what_is_no_run_of_its_own_is_not_written_over(run: Run, folder: Path, tmp_path: Path) -> None:
    for name, content in (("config.json", "{}"), ("answers.jsonl", "mine"), ("provenance.json", "{}")):
        out = tmp_path / name.partition(".")[0]
        out.mkdir()
        (out / name).write_text(content)
        result = run("medusa:heads=2", *SMALL, "--out", out)
        said = " ".join(result.stderr.split())
        assert result.exit_code == 2 and "overwritten; give another --out" in said, said
        assert [file.name for file in out.iterdir()] == [name] and (out / name).read_text() == content
    result = run("medusa:heads=2", *SMALL, "--out", tmp_path / "prompts.jsonl")
    assert result.exit_code == 2 and "is a file, but --out must be a folder" in " ".join(
        result.stderr.split()
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    assert run("medusa:heads=2", *SMALL, "--out", tmp_path / "notes").exit_code == 0
    broken = tmp_path / "notes" / "answers.json"
    broken.write_text("{")
    result = run("medusa:heads=2", *SMALL, "--out", tmp_path / "notes")
    assert result.exit_code == 2 and "cannot be read" in result.stderr


def test_the_bar_begins_where_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    notes = []
    for steps in ("stopped", "whole"):
        result = run("medusa:heads=2,max_nodes=4", *SMALL, "--out", tmp_path / "out")
        notes.append([line for line in result.stderr.splitlines() if line.startswith("steps: ")])
        checkpoint = tmp_path / "out" / "checkpoint" / "progress.json"
        if steps == "stopped":
            held = json.loads(checkpoint.read_text())
            held["progress"]["step"] = 4
            checkpoint.write_text(json.dumps(held))
    assert [line.split(",")[0] for line in notes[1]] == ["steps: 5 of 6", "steps: 6 of 6"]
    assert notes[0][-1].startswith("steps: 6 of 6")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("medusa:depth=2", (), "medusa has no option 'depth'"),
        (
            "magic",
            (),
            "there is no method 'magic'. There are: blockwise, dflash, draft_model, eagle, early_exit",
        ),
        ("medusa", ("--objective", "luck"), "there is no objective 'luck'"),
        ("medusa", ("--tune", "magic"), "there is no way to train a model 'magic'. There are: lora"),
        ("medusa", ("--tune", "lora:size=2"), "lora has no option 'size'"),
        ("spec_drafter", ("--tune", "lora"), "spec_drafter reads no hidden states"),
        ("medusa", ("--length", "4000"), "the model's context is 96; give --length 96 or less"),
        ("medusa", ("--data", "/nowhere.jsonl"), "cannot read /nowhere.jsonl"),
        ("medusa", ("--data", "hub:split=test"), "hub needs name"),
        ("medusa", ("--on-policy", "0.5"), "so it cannot write its own text to learn from; leave out"),
        ("medusa", ("--on-policy", "2"), "on_policy must be a fraction from 0 to 1, not 2.0"),
        ("medusa", ("--draft", "x"), "medusa cannot start from a model"),
        ("medusa", ("--boost-after", "/nowhere"), "/nowhere is not the folder of a trained drafter"),
        ("draft_model", ("--draft", "./nowhere"), "transformers cannot load './nowhere'"),
        (
            "draft_model:depth=2",
            ("--draft", "x"),
            "draft_model has no option 'depth'; it has: num_speculative_tokens",
        ),
        ("draft_model:heads=3", (), "heads must be a multiple of kv_heads"),
        ("draft_model:context=20", (), "more than the drafter's context of 20"),
        ("early_exit:layers=1", (), "the target has 1 layers, so layers must be at most 0, not 1"),
    ],
)
def test_mistakes(run: Run, method: str, options: Any, message: str, tmp_path: Path) -> None:
    result = run(method, *SMALL, "--out", tmp_path / "out", *options)
    assert message in " ".join(result.stderr.split()), result.output
    assert result.exit_code == 2 and "Traceback" not in result.output

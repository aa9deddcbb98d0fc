"""Encoder-decoder models on the command line: prompts are their sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from folders import byte_tokenizer
from outpace.loading import load
from zoo.image_families import build
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES

try:
    import sentencepiece as SENTENCEPIECE
except ImportError:
    SENTENCEPIECE = None
TEXTS = ["abcabcabc", "the tin hat", "xyzxyz"]
NEW = 24
Run = Callable[..., Any]


@pytest.fixture(scope="module", params=["t5", "bart"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, whose decoder BART forces to begin with a token of its config."""
    place: Path = tmp_path_factory.mktemp("models") / request.param
    family = SEQ2SEQ_FAMILIES[request.param]
    tokenizer = byte_tokenizer()
    options = {**family.options, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if request.param == "bart":
        options["forced_bos_token_id"] = 9
    model = type(family)(family.model, family.config, options).build(torch.float32)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(text) + "\n" for text in TEXTS), "utf-8")
    return file


def stock(folder: Path) -> list[list[int]]:
    """The output of transformers itself, without the tokens that the decoder is given."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    outputs = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=NEW + 1, do_sample=False)
        given = 1 if model.generation_config.forced_bos_token_id is None else 2
        outputs.append(output[0, given:].tolist()[:NEW])
    return outputs


@pytest.mark.parametrize("drafter", ["none", "lookahead", "prompt_lookup", "reference"])
def test_generate(run: Run, folder: Path, prompts: Path, drafter: str) -> None:
    options = ("--dtype", "float64", "--json", "-n", NEW, "--batch", 2, "-d", drafter, "--no-adaptive")
    result = run("generate", "-m", folder, "--file", prompts, *options)
    assert result.exit_code == 0, result.output
    found = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda one: one["index"])
    assert [one["tokens"] for one in found] == stock(folder)


@pytest.mark.parametrize("verifier", ["match", "typical"])
def test_compare(run: Run, folder: Path, verifier: str) -> None:
    options = ("--compare", "--repeats", 1, "--verifier", verifier, "--no-adaptive")
    result = run("generate", "-m", folder, "-p", TEXTS[0], "-n", NEW, *options)
    assert result.exit_code == 0, result.output
    assert "equal: yes" in result.stdout or verifier == "typical"


def test_marian(run: Run, tmp_path: Path, prompts: Path) -> None:
    """Tokens that a generation config forbids, a Marian's pad for one, are not emitted."""
    tokenizer, folder = byte_tokenizer(), tmp_path / "marian"
    family = SEQ2SEQ_FAMILIES["marian"]
    model = replace(family, options={**family.options, "vocab_size": len(tokenizer)}).build(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    free = stock(folder)
    config = model.generation_config
    found = [free]
    for name, tokens in (
        ("bad_words_ids", [[free[0][0]]]),
        ("suppress_tokens", [195]),
        ("begin_suppress_tokens", [81, 2]),
        ("bad_words_ids", [[free[0][0]], [251, 251]]),
    ):
        setattr(config, name, tokens)
        model.save_pretrained(folder)
        found.append(stock(folder))
        assert found[-1] != found[-2], name  # each rule matters
    expected = found[-1]
    options = ("--dtype", "float64", "--json", "-n", NEW, "--no-adaptive", "--file", prompts)
    for drafter in ("none", "lookahead", "prompt_lookup"):
        result = run("generate", "-m", folder, *options, "-d", drafter)
        assert result.exit_code == 0, result.output
        assert [json.loads(line)["tokens"] for line in result.stdout.splitlines()] == expected


def save_marian(folder: Path) -> None:
    """A random Marian whose tokenizer is a real one's: sentencepiece files and a vocabulary."""
    (folder / "text.txt").write_text("\n".join(TEXTS * 4), "utf-8")
    special = ["<unk>", "</s>", "<pad>"]
    pieces = special
    if SENTENCEPIECE is not None:
        SENTENCEPIECE.SentencePieceTrainer.train(
            input=str(folder / "text.txt"),
            model_prefix=str(folder / "source"),
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / "source.model").rename(folder / "source.spm")
        (folder / "target.spm").write_bytes((folder / "source.spm").read_bytes())
        found = SENTENCEPIECE.SentencePieceProcessor(model_file=str(folder / "source.spm"))
        own = [found.id_to_piece(place) for place in range(found.vocab_size())]
        pieces = special + [piece for piece in own if piece not in (*special, "<s>")]
    (folder / "vocab.json").write_text(json.dumps({piece: place for place, piece in enumerate(pieces)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    family = SEQ2SEQ_FAMILIES["marian"]
    size = {"vocab_size": len(pieces), "pad_token_id": 2, "eos_token_id": 1, "bad_words_ids": [[2]]}
    replace(family, options={**family.options, **size}).build(torch.float32).save_pretrained(folder)


@pytest.mark.skipif(SENTENCEPIECE is None, reason="needs sentencepiece; run `make test-optional`")
def test_marians_own_tokenizer(run: Run, tmp_path: Path, prompts: Path) -> None:
    save_marian(tmp_path)
    options = ("--dtype", "float64", "--json", "-n", NEW, "--file", prompts)
    result = run("generate", "-m", tmp_path, *options)
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["tokens"] for one in found] == stock(tmp_path)
    assert all(one["text"] for one in found)


@pytest.mark.skipif(SENTENCEPIECE is not None, reason="sentencepiece is installed")
def test_marian_without_sentencepiece(run: Run, tmp_path: Path) -> None:
    save_marian(tmp_path)
    result = run("generate", "-m", tmp_path, "-p", "x")
    assert result.exit_code == 2
    assert "needs sentencepiece: pip install sentencepiece" in " ".join(result.stderr.split())


def test_bench(run: Run, folder: Path, prompts: Path) -> None:
    """transformers' own decoding too is on the same sources, and each output equals the others."""
    result = run(
        "bench", "-m", folder, "--suite", f"file:{prompts}", "-n", NEW, "--json", "-", "--batch", "1,3"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert {(row["drafter"], row["batch"]) for row in rows} >= {
        ("none", 1),
        ("prompt_lookup", 3),
        ("transformers:plain", 1),
        ("transformers:plain", 3),
    }
    for row in rows:
        assert row["error"] is None and row["equal"], row


TRAINED = [
    "blockwise:heads=2",
    "dflash:tokens=3,layers=1+2",
    "eagle:layers=1+2",
    "hydra:heads=2",
    "medusa:heads=2",
    "spec_drafter:tokens=3",
]


@pytest.mark.parametrize("method", TRAINED)
def test_train(run: Run, folder: Path, prompts: Path, tmp_path: Path, method: str) -> None:
    """Drafters learn the model's answers to sources, and change none."""
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out"
    asked.write_text("".join(json.dumps({"prompt": f"say {number} " * 3}) + "\n" for number in range(12)))
    settings = ("--steps", 4, "--rows", 3, "--length", 40, "--held-out", 0.3, "-n", 12, "--json")
    model = ("-m", folder, "--dtype", "float64")
    result = run("train", method, *model, "--data", asked, "--out", out, "--states", tmp_path, *settings)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["expected_length"] >= 1
    written = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    start = list(load(str(folder), seq2seq=True).target.start)
    assert all(line["tokens"][: line["prompt_length"]] == start for line in written)
    assert len({tuple(line["source"]) for line in written}) == 12
    drafter = ("-d", f"{method.partition(':')[0]}:path={out}", "--no-adaptive", "--json", "--batch", 2)
    result = run("generate", *model, "--file", prompts, "-n", NEW, *drafter)
    assert result.exit_code == 0, result.output
    found = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda one: one["index"])
    assert [one["tokens"] for one in found] == stock(folder)
    assert all(one["stats"]["drafted"] > 0 for one in found)


def test_training_on_texts_without_prompts_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('"a text"\n')
    texts = ("--data", tmp_path / "texts.jsonl", "--length", 40)
    result = run("train", "medusa", "-m", folder, *texts, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "answers prompts; give prompts, not texts" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["chat", "search", "serve", "tune"])
def test_other_commands_refuse(run: Run, folder: Path, prompts: Path, tmp_path: Path, command: str) -> None:
    more: dict[str, list[Any]] = {
        "search": ["--data", prompts, "--out", tmp_path / "out.json"],
        "serve": ["--port", 0],
        "tune": ["--out", tmp_path / "out"],
    }
    result = run(command, "-m", folder, *more.get(command, []))
    assert result.exit_code == 2, result.output
    assert "is an encoder-decoder model; use it with `outpace generate`, `outpace train`" in " ".join(
        result.stderr.split()
    )


@pytest.mark.parametrize("command", [["generate", "-p", "x"], ["serve", "--port", 0]])
def test_images_are_refused(run: Run, tmp_path: Path, command: list[Any]) -> None:
    build("llava").save_pretrained(tmp_path)
    result = run(*command, "-m", tmp_path)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert "(llava) reads images; use it from Python: outpace.accelerate(model, drafter)" in told

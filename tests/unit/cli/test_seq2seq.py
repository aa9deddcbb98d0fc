"""Encoder-decoder models on the command line: prompts are their sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from folders import byte_tokenizer
from parts import first, in_turn
from seq2seq_models import NEW, TEXTS, folder, prompts, stock
from zoo.image_families import build
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES

try:
    import sentencepiece as SENTENCEPIECE
except ImportError:
    SENTENCEPIECE = None
__all__ = ["folder", "prompts"]
Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("drafter", "folder"),
    in_turn(["none", "lookahead", "prompt_lookup", "reference"], ["t5", "bart"]),
    indirect=["folder"],
)
def test_generate(run: Run, folder: Path, prompts: Path, drafter: str) -> None:
    options = ("--dtype", "float64", "--json", "-n", NEW, "--batch", 2, "-d", drafter, "--no-adaptive")
    result = run("generate", "-m", folder, "--file", prompts, *options)
    assert result.exit_code == 0, result.output
    found = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda one: one["index"])
    assert [one["tokens"] for one in found] == stock(folder)


@pytest.mark.parametrize("verifier", ["match", "loose:Loose"])
def test_compare(run: Run, folder: Path, verifier: str) -> None:
    options = ("--compare", "--repeats", 1, "--verifier", verifier, "--no-adaptive")
    result = run("generate", "-m", folder, "-p", TEXTS[0], "-n", NEW, *options)
    assert result.exit_code == 0, result.output
    assert "equal: yes" in result.stdout or verifier == "loose:Loose"


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


@pytest.mark.parametrize("folder", first(1, ["bart", "t5"]), indirect=True)
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


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_other_commands_refuse(run: Run, folder: Path, command: str) -> None:
    result = run(command, "-m", folder, *(["--port", 0] if command == "serve" else []))
    assert result.exit_code == 2, result.output
    assert "is an encoder-decoder model; use it with `outpace generate`, `outpace train`" in " ".join(
        result.stderr.split()
    )


def test_images_are_refused(run: Run, tmp_path: Path) -> None:
    build("llava").save_pretrained(tmp_path)
    result = run("generate", "-p", "x", "-m", tmp_path)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert "(llava) reads images; use it with `outpace serve`, or from Python: outpace.accelerate" in told

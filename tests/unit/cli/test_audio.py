"""Models of speech on the command line: each wav file is a source."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor

from folders import byte_tokenizer, save_llama
from outpace.cli.encoder_decoder import read_wav
from outpace.core import OutpaceError
from outpace.loading import load
from parts import first
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES

NEW = 16
RATE = 16000
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Whisper of several languages, which reads one second."""
    place: Path = tmp_path_factory.mktemp("models") / "whisper"
    tokenizer, family = byte_tokenizer(), SEQ2SEQ_FAMILIES["whisper"]
    options = {
        **family.options,
        "vocab_size": len(tokenizer) + 1,  # the last is "no time stamps"
        "max_source_positions": 50,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = replace(family, options=options).build(torch.float32)
    config = model.generation_config
    config.no_timestamps_token_id, config.is_multilingual = len(tokenizer), True
    config.lang_to_id, config.task_to_id = (
        {"<|en|>": 190, "<|fr|>": 191},
        {"transcribe": 192, "translate": 193},
    )
    config.suppress_tokens = [34, 208, len(tokenizer)]
    config.begin_suppress_tokens = [73, 185, 230, tokenizer.eos_token_id]
    model.save_pretrained(place)
    config._from_model_config = False  # otherwise transformers makes a new one on loading
    config.save_pretrained(place)
    tokenizer.save_pretrained(place)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(place)
    return place


def write_wav(file: Path, seconds: float, tone: float = 440, rate: int = RATE, channels: int = 1) -> Path:
    """A tone with noise; a second channel is silent."""
    times = np.arange(int(rate * seconds)) / rate
    noise = np.random.default_rng(int(tone)).normal(size=len(times))
    samples = np.zeros((len(times), channels), np.int16)
    samples[:, 0] = (8000 * np.sin(2 * np.pi * tone * times) + 2000 * noise).astype(np.int16)
    with wave.open(str(file), "wb") as sound:
        sound.setparams((channels, 2, rate, len(times), "NONE", ""))
        sound.writeframes(samples.tobytes())
    return file


@pytest.fixture
def sounds(tmp_path: Path) -> list[Path]:
    return [write_wav(tmp_path / f"{tone}.wav", 0.7, tone) for tone in (300, 1200, 3000)]


def stock(folder: Path, sounds: list[Path], **asked: str) -> list[list[int]]:
    """The output of transformers itself, whose generate() returns the new tokens alone."""
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float64)
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    outputs = []
    for file in sounds:
        with wave.open(str(file), "rb") as sound:
            heard = np.frombuffer(sound.readframes(sound.getnframes()), np.int16).astype(np.float32) / 32768
        features = extractor(heard, sampling_rate=RATE, return_tensors="pt").input_features.double()
        found = model.generate(features, max_new_tokens=NEW, do_sample=False, **asked)[0].tolist()
        outputs.append(found)
    return outputs


def tokens(result: Any) -> list[list[int]]:
    assert result.exit_code == 0, result.output
    found = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda one: one["index"])
    return [one["tokens"] for one in found]


def given(sounds: list[Path]) -> list[Any]:
    return [part for file in sounds for part in ("--audio", file)]


ASKED = [{}, {"language": "en", "task": "translate"}, {"language": "fr"}]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("asked", first(2, ASKED), ids=lambda asked: "-".join(asked.values()) or "detected")
def test_generate(run: Run, folder: Path, sounds: list[Path], asked: dict[str, str]) -> None:
    expected = stock(folder, sounds, **asked)
    assert len({str(one) for one in expected}) == 3
    model = ("-m", folder, "--dtype", "float64", "--json", "-n", NEW, "--no-adaptive")
    options = [part for name, value in asked.items() for part in (f"--{name}", value)]
    for drafter, batch in (("none", 2), ("lookahead", 1), ("prompt_lookup", 2)):
        result = run("generate", *model, *given(sounds), *options, "-d", drafter, "--batch", batch)
        assert tokens(result) == expected, (drafter, batch)


def test_rules_and_language_matter(folder: Path, sounds: list[Path]) -> None:
    """Otherwise the test above would pass without them."""
    outputs = [str(stock(folder, sounds, **asked)) for asked in ASKED]
    assert len(set(outputs)) == 3


def test_sampled(run: Run, folder: Path, sounds: list[Path]) -> None:
    model = ("-m", folder, "--dtype", "float64", "--json", "-n", NEW, "--no-adaptive", "-t", 1, "--seed", 3)
    plain, drafted = (
        tokens(run("generate", *model, *given(sounds), "-d", drafter)) for drafter in ("none", "lookahead")
    )
    assert plain == drafted
    assert plain != stock(folder, sounds)


def test_compare(run: Run, folder: Path, sounds: list[Path]) -> None:
    result = run("generate", "-m", folder, *given(sounds), "-n", NEW, "--compare", "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert "equal: yes, all 3 prompts" in result.stdout


def test_channels_are_averaged(tmp_path: Path) -> None:
    one, two = (read_wav(write_wav(tmp_path / "a.wav", 0.1, channels=n), RATE) for n in (1, 2))
    assert np.allclose(one, 2 * two)


def bad(place: Path) -> dict[str, Path]:
    """Files that are refused."""
    write_wav(place / "rate.wav", 0.1, rate=8000)
    write_wav(place / "long.wav", 1.5)
    write_wav(place / "none.wav", 0)
    (place / "text.wav").write_text("not a sound")
    whole = write_wav(place / "cut.wav", 0.5).read_bytes()
    (place / "cut.wav").write_bytes(whole[:-1001])
    return {name: place / f"{name}.wav" for name in ("rate", "long", "none", "text", "cut", "missing")}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("rate", "8000 samples a second of 16 bits, the model reads 16000 of 16; convert it: ffmpeg -i"),
        ("long", "lasts 1.5 s, and the command line takes 1 s; cut it"),
        ("none", "is empty"),
        ("text", "is not a wav file of PCM samples"),
        ("cut", "is cut short"),
        ("missing", "No such file"),
    ],
)
def test_bad_files(run: Run, folder: Path, tmp_path: Path, name: str, told: str) -> None:
    result = run("generate", "-m", folder, "--audio", bad(tmp_path)[name])
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
    assert result.stderr.count("Error") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--prompt", "x"], "leave --prompt out"),
        (["--chat"], "leave --chat out"),
        (["--language", "xx"], "Unsupported language: xx"),
        (["--language", "de"], "<|de|> is not supported by this specific model"),
        (["--task", "sing"], "The `sing` task is not supported"),
    ],
)
def test_bad_options(run: Run, folder: Path, sounds: list[Path], options: list[str], told: str) -> None:
    result = run("generate", "-m", folder, *given(sounds[:1]), *options)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


def test_what_does_not_fit_together(run: Run, folder: Path, sounds: list[Path], tmp_path: Path) -> None:
    text = save_llama(tmp_path / "llama")
    for options, told in [
        (["-m", folder, "-p", "x"], "use it with `outpace generate --audio FILE.wav`"),
        (["-m", folder, "-p", "x", "--language", "fr"], "give --audio FILE.wav too"),
        (["-m", text, *given(sounds[:1])], "(llama) reads no audio; leave --audio out"),
    ]:
        result = run("generate", *options)
        assert result.exit_code == 2
        assert told in " ".join(result.stderr.split())
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(OutpaceError, match="--audio is for transformers models"):
        load(str(tmp_path / "x.gguf"), seq2seq="audio")
    (folder / "preprocessor_config.json").rename(tmp_path / "aside.json")
    try:
        result = run("generate", "-m", folder, *given(sounds[:1]))
    finally:
        (tmp_path / "aside.json").rename(folder / "preprocessor_config.json")
    assert result.exit_code == 2
    assert "has no feature extractor that can be loaded" in " ".join(result.stderr.split())

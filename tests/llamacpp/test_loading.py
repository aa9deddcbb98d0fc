"""GGUF files wherever a model is named: their tokenizer, options, limits, and what is wrong with them."""

from __future__ import annotations

import asyncio
import copy
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

import outpace
from gguf_files import _model, gguf_file
from outpace.cache import CacheFull
from outpace.cli import app
from outpace.core import ContextOverflow, OutpaceError, SamplingParams, UnsupportedModel
from outpace.drafters.models.draft_model import DraftModel
from outpace.embedded import nano_path
from outpace.engine.engine import Engine
from outpace.loading.placement import Spread
from outpace.serve.pool import JobLimit
from outpace.serve.texts import Texts
from outpace.serve.totals import Turns
from outpace.targets import Rows, Target
from outpace.targets.batch import Batch
from outpace.targets.llamacpp.library import ROWS
from outpace.testing.gguf import splitting, write_gguf

TEXT = "Tom has 12 apples.\n\n    def add(a, b):  # x\n\treturn a+b 3.14 – 日本語 🙂\n  \n x"
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return outpace.load(str(gguf_file("q8_0")), llamacpp="threads=1")


def test_the_tokenizer_in_the_file_is_the_models_own(loaded: Any) -> None:
    own = AutoTokenizer.from_pretrained(nano_path())
    ids = own(TEXT).input_ids
    assert splitting(own) == "smollm" and loaded.tokens(TEXT) == ids
    assert loaded.tokenizer.decode(ids) == TEXT
    special = [*ids[:3], own.eos_token_id]
    assert loaded.tokenizer.decode(special, skip_special_tokens=True) == own.decode(ids[:3])
    assert loaded.tokenizer.decode(special).endswith("<|endoftext|>")
    assert loaded.tokenizer.get_vocab() == own.get_vocab()
    assert loaded.tokens("a<|endoftext|>b") == own("a<|endoftext|>b").input_ids
    assert loaded.target.eos_token_ids == {own.eos_token_id}
    turn = [{"role": "user", "content": "What is 2 + 3?"}]
    assert loaded.render(turn) == own.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


def test_the_tokenizer_has_the_everyday_calls_of_transformers(loaded: Any) -> None:
    own, tokenizer = AutoTokenizer.from_pretrained(nano_path()), loaded.tokenizer
    assert tokenizer.encode(TEXT) == tokenizer(TEXT)["input_ids"] == own.encode(TEXT)
    assert tokenizer([TEXT, "a"])["attention_mask"] == own([TEXT, "a"])["attention_mask"]
    ids = own([TEXT, "a b"]).input_ids
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == [TEXT, "a b"]
    for given in (TEXT, [TEXT, TEXT]):
        found, expected = tokenizer(given, return_tensors="pt"), own(given, return_tensors="pt")
        assert found.keys() <= expected.keys() and all(found[key].equal(expected[key]) for key in found)
    turn = [{"role": "user", "content": "What is 2 + 3?"}]
    asked = {"add_generation_prompt": True, "return_tensors": "pt"}
    found = tokenizer.apply_chat_template(turn, **asked)
    assert found["input_ids"].equal(own.apply_chat_template(turn, **asked)["input_ids"])
    assert (
        tokenizer.apply_chat_template(turn, return_dict=False) == own.apply_chat_template(turn)["input_ids"]
    )
    with pytest.raises(OutpaceError, match="does not pad"):
        tokenizer([TEXT, "a"], return_tensors="pt")
    with pytest.raises(OutpaceError, match="takes no padding"):
        tokenizer.apply_chat_template(turn, padding=True)


def test_long_texts_are_read_in_a_process_that_reads_the_vocabulary_again(loaded: Any) -> None:
    text = TEXT * 2000
    spread = copy.deepcopy(loaded.tokenizer)
    spread.chat_template = "{{ messages[0]['content'] }}"
    again = pickle.loads(pickle.dumps(spread))
    assert again.chat_template == spread.chat_template and again(TEXT).input_ids == loaded.tokens(TEXT)

    async def read() -> Any:
        texts = Texts(loaded, JobLimit(60, 2**30), Turns(1))
        found = await texts.tokens(text, True, None)
        assert texts._threads is None
        await texts.close()
        return found

    assert asyncio.run(read()) == loaded.tokens(text)


def test_a_loaded_file_decodes_text_and_says_what_it_is(loaded: Any) -> None:
    assert str(loaded).endswith("nano-q8_0.gguf, q8_0 on cpu")
    ids = loaded.tokens("Question: What is 2 + 3?\nAnswer:")
    plain, drafted = (loaded.engine(drafter).generate([ids], PARAMS)[0] for drafter in (None, "suffix"))
    assert plain.tokens == drafted.tokens and plain.text


def test_the_tokens_that_end_a_text_or_a_turn_end_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens of the embedded model's answer, as the file's end of text and end of turn."""
    model, tokenizer = _model(False)
    plain = Engine(Target(gguf_file("q8_0"), threads=1)).generate([[5, 6, 7]], PARAMS)[0].tokens
    turn, text = list(dict.fromkeys(plain))[4:6]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(text)
    add = gguf.GGUFWriter.add_eos_token_id

    def both(writer: Any, token: int) -> None:
        add(writer, token)
        writer.add_eot_token_id(turn)

    for ends in (add, both):
        monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", ends)
        write_gguf(model, tmp_path / "ends.gguf", "q8_0", tokenizer)
        target = Target(tmp_path / "ends.gguf", threads=1)
        assert {text} <= target.eos_token_ids and (turn in target.eos_token_ids) == (ends is both)
        for drafter in (None, "suffix"):
            found = Engine(target, drafter).generate([[5, 6, 7]], SamplingParams(max_new_tokens=24))[0]
            end = plain.index(turn if ends is both else text)
            assert found.finish_reason == "eos" and found.tokens == plain[: end + 1]


def test_rows_of_prompts_that_begin_alike_are_computed_once(loaded: Any) -> None:
    ids = loaded.tokens(TEXT * 3)
    expected = Engine(loaded.target).generate([ids], PARAMS)[0].tokens
    engine = Engine(loaded.target, "prompt_lookup", prefix_cache=2**24)
    for _ in range(2):
        found = engine.generate([ids], PARAMS)[0]
        assert found.tokens == expected
    assert found.stats.cached_tokens >= 32


def test_the_cache_grows_and_ended_texts_make_room(loaded: Any) -> None:
    prompts = [loaded.tokens(TEXT * n) for n in (1, 2, 4, 1, 3)]
    params = SamplingParams(max_new_tokens=24, temperature=0.9, seed=5, ignore_eos=True)
    expected = [Engine(loaded.target).generate([ids], params)[0].tokens for ids in prompts]
    small = loaded.target.row_bytes * 700
    engine = Engine(loaded.target, "lookahead:window=3,ngram=3,guesses=3", adaptive=False, memory=small)
    cells = engine._batch.cache.context.cells
    assert [one.tokens for one in engine.generate(prompts, params)] == expected
    assert engine._batch.cache.context.cells > cells and engine._batch.cache.reserved == 0


@pytest.mark.parametrize("rows", [253, 257, 262, 509, 512, 513, 1030])
def test_prompts_of_any_length_fit_a_decode(loaded: Any, rows: int) -> None:
    """llama.cpp ends the process if a decode has more rows than its context takes at once."""
    prompt = (loaded.tokens(TEXT * 40) * 3)[:rows]
    cache = loaded.target.new_cache()
    assert cache.context._lib.llama_n_batch(cache.context._context) == ROWS
    found = [
        Engine(loaded.target, drafter).generate([prompt], PARAMS)[0].tokens for drafter in (None, "suffix")
    ]
    assert found[0] == found[1]


def test_limits_are_told(loaded: Any) -> None:
    with pytest.raises(ContextOverflow, match="context 2048"):
        Engine(loaded.target).generate([[5] * 2049], PARAMS)
    cache = loaded.target.new_cache(1, 16, capacity=32)
    cache.allocate(20)
    with pytest.raises(CacheFull, match="20 of 32 are reserved"):
        cache.allocate(20)
    with pytest.raises(OutpaceError, match="shares no hidden states"):
        Engine(loaded.target, "medusa")
    with pytest.raises(OutpaceError, match="plain stack of layers"):
        Engine(loaded.target, "self_speculative:skip=1")
    slot = cache.allocate(4)
    loaded.target.forward(cache, Batch.of({slot: Rows([1, 2, 3], (-1, 0, 0))}))
    with pytest.raises(ValueError, match="neither a path nor all"):
        cache.keep({slot: [1, 2]})


def test_draft_models_of_both_kinds(loaded: Any) -> None:
    ids = loaded.tokens("Question: What is 2 + 3?\nAnswer:")
    expected = Engine(loaded.target).generate([ids], PARAMS)[0].tokens
    for drafter in (
        f"draft_model:model={gguf_file('q4_0', draft=True)}",
        "draft_model",
        f"draft_model:vocabulary=intersection,model={gguf_file('q8_0', draft=True)}",
        DraftModel(loaded.target, vocabulary="text", tokenizer=loaded.tokenizer),
    ):
        found = Engine(loaded.target, drafter, adaptive=False).generate([ids], PARAMS)[0]
        assert found.tokens == expected and found.stats.accepted > 0


def broken(path: Path, kind: str) -> Path:
    whole = gguf_file("q8_0").read_bytes()
    parts = {
        "truncated": whole[: len(whole) // 2],
        "cut early": whole[:4000],
        "text": b"version https://git-lfs.github.com/spec/v1\n",
        "empty": b"",
        "unknown": whole.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"lluma"),
    }
    path.write_bytes(parts[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "is truncated or damaged; fetch it again"),
        ("cut early", "is truncated or damaged; fetch it again"),
        ("text", "does not begin with the letters GGUF"),
        ("empty", "does not begin with the letters GGUF"),
        ("unknown", "does not know the architecture 'lluma'"),
    ],
)
def test_broken_files_are_named_in_one_line(
    kind: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OutpaceError, match=message) as error:
        Target(broken(tmp_path / "model.gguf", kind))
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_split_files_name_the_first_part_and_what_is_missing(tmp_path: Path) -> None:
    for part in (1, 2):
        shutil.copy(gguf_file("q8_0"), tmp_path / f"m-0000{part}-of-00003.gguf")
    with pytest.raises(OutpaceError, match="give the first part, m-00001-of-00003"):
        Target(tmp_path / "m-00002-of-00003.gguf")
    with pytest.raises(OutpaceError, match="missing beside it: m-00003-of-00003"):
        Target(tmp_path / "m-00001-of-00003.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads must be at least 1"),
        ({"n_gpu_layers": -2}, "n_gpu_layers must be"),
        ({"type_k": "int3"}, "type_k must be one of float32"),
        ({"type_v": "q8_0", "flash_attn": False}, "needs flash attention"),
        ({"thread": 1}, "unexpected keyword argument 'thread'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        Target(gguf_file("q8_0"), **options)


def test_options_of_transformers_are_refused(loaded: Any) -> None:
    for more in ({"dtype": "float16"}, {"device": "cuda"}, {"trust_remote_code": True}):
        with pytest.raises(OutpaceError, match="is a GGUF file"):
            outpace.load(loaded.source, **more)
    with pytest.raises(OutpaceError, match="--device-map is for transformers models"):
        outpace.load(loaded.source, device=Spread("auto"))
    with pytest.raises(OutpaceError, match=r"is for \.gguf files"):
        outpace.load(None, llamacpp="threads=1")
    with pytest.raises(UnsupportedModel, match="is not a GGUF file"):
        Target("some/model")


def test_a_file_without_a_tokenizer_decodes_ids_alone(tmp_path: Path) -> None:
    write_gguf(_model(False)[0], tmp_path / "bare.gguf", "q8_0")
    found = Engine(Target(tmp_path / "bare.gguf", check=False, threads=1)).generate([[5, 6, 7]], PARAMS)[0]
    assert len(found.tokens) == 24
    with pytest.raises(OutpaceError, match="has no tokenizer"):
        outpace.load(str(tmp_path / "bare.gguf"), backend="llamacpp")


def test_the_command_line_takes_a_file() -> None:
    asked = ["generate", "--model", str(gguf_file("q8_0")), "--drafter", "suffix", "--prompt", "def f(x):"]
    found = CliRunner().invoke(app, [*asked, "--max-new-tokens", "16", "--compare", "--repeats", "1"])
    assert found.exit_code == 0 and "equal: yes" in found.output

"""A part of the vocabulary for drafts of ``mtp`` and ``assistant``: which tokens, and that none changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from accelerator import Accelerator
from assistant_folders import VOCABULARY as OF_GEMMA
from assistant_folders import assistant, gemma, learn
from folders import byte_tokenizer
from models import tiny_llama
from mtp_folders import VOCABULARY, load, write, write_beside
from outpace import Engine, Target
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.assistant.assistant import Assistant
from outpace.drafters.mtp.mtp import Mtp
from outpace.learned import frequent
from outpace.learned.frequent import common, drafted_of, most_frequent
from outpace.learned.head import PartialHead
from outpace.targets import TargetModel
from parts import since
from watching import Watch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6, 11, 30, 12, 14, 15, 17, 19]]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
SHORT = [[5], [3, 9, 2]]
PART = [token for token in range(VOCABULARY) if token % 3]
OF_ASSISTANT = [token for token in range(OF_GEMMA) if token % 4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def folder(name: str, layers: int) -> Path:
        return write(tmp_path_factory.mktemp(name), name, layers)

    return folder


@cache
def taught() -> tuple[TargetModel, Any]:
    """A Gemma 4, and an assistant that has learned its texts."""
    target, made = Target(gemma(0)), assistant()
    texts = [p + g.tokens for p, g in zip(PROMPTS, Engine(target).generate(PROMPTS, GREEDY), strict=True)]
    learn(made, target.model, [text[-24:] for text in texts])
    return target, made


def drafted(target: TargetModel, drafter: Any, params: SamplingParams, verifier: str = "match") -> Watch:
    """The steps of some texts, after a comparison with plain decoding where that is promised."""
    watch = Watch()
    engine = Engine(target, drafter, verifier, adaptive=False, observer=watch)
    found = engine.generate(PROMPTS, params)
    if verifier == "match":
        assert [g.tokens for g in found] == [g.tokens for g in Engine(target).generate(PROMPTS, params)]
    assert sum(g.stats.accepted for g in found) > 0
    return watch


@since("5.24")
@pytest.mark.parametrize(("name", "layers"), [("glm4_moe", 1), ("deepseek_v3", 2), ("qwen3_5_text", 1)])
@pytest.mark.parametrize("options", [{}, {"expand": 3, "max_nodes": 6}], ids=["chains", "trees"])
def test_mtp(folders: Callable[..., Path], name: str, layers: int, options: dict[str, Any]) -> None:
    target = Target(load(folders(name, layers)))
    for params in (GREEDY, SAMPLED):
        steps = drafted(target, Mtp(draft_vocabulary=PART, **options), params).steps
        assert {token for step in steps for token in step.draft.tokens} <= {*PART}


@pytest.mark.parametrize("options", [{}, {"expand": 3, "max_nodes": 6}], ids=["chains", "trees"])
def test_assistants(options: dict[str, Any]) -> None:
    target, made = taught()
    for params in (GREEDY, SAMPLED):
        drafter = Assistant(path=made, draft_vocabulary=OF_ASSISTANT, **options)
        steps = drafted(target, drafter, params).steps
        assert {token for step in steps for token in step.draft.tokens} <= {*OF_ASSISTANT}


@since("5.24")
def test_distributions_are_the_whole_heads_over_the_part(folders: Callable[..., Path]) -> None:
    """What ``rejection`` weighs: p over all ids, 0 beyond the part, and renormalised in it."""
    target = Target(load(folders("glm4_moe", 1)))
    gemma4, made = taught()
    for model, few, whole, part in (
        (target, Mtp(draft_vocabulary=PART), Mtp(), PART),
        (gemma4, Assistant(path=made, draft_vocabulary=OF_ASSISTANT), Assistant(path=made), OF_ASSISTANT),
    ):
        steps = drafted(model, few, SAMPLED, "rejection").steps
        other = drafted(model, whole, SAMPLED, "rejection").steps
        rows = [
            [p for step in one for p in (step.draft.distributions or {}).values()] for one in (steps, other)
        ]
        assert len(rows[0]) > 10
        outside = torch.ones(model.vocabulary, dtype=torch.bool).index_fill(0, torch.tensor(part), False)
        for p in rows[0]:
            assert not p[outside].any() and p.sum() == pytest.approx(1)
        # The first draft of a text follows from the same states.
        first, same = rows[0][0].double(), rows[1][0].double().masked_fill(outside, 0)
        torch.testing.assert_close(first, same / same.sum(), rtol=0, atol=1e-6)


@since("5.24")
def test_drafts_on_an_emulated_gpu_are_the_cpus(tmp_path: Path) -> None:
    model = tiny_llama(vocabulary=48).float()
    texts = [p + g.tokens for p, g in zip(SHORT, Engine(Target(model)).generate(SHORT, GREEDY), strict=True)]
    drafter = Mtp(path=write_beside(tmp_path, model, texts), draft_vocabulary=[*range(2, 48)])

    def tokens(engine: Engine) -> list[list[int]]:
        found = engine.generate(SHORT, GREEDY)
        assert sum(one.stats.accepted for one in found) > 0
        return [one.tokens for one in found]

    expected = tokens(Engine(Target(model), drafter, adaptive=False, slots=2))
    with Accelerator("cuda") as on:
        engine = Engine(Target(model.to("cuda:0"), check=False), drafter, adaptive=False, slots=2)
        on.counts.clear()
        assert tokens(engine) == expected
        assert on.counts.replays and not on.counts.blocking, on.counts.blocking


@since("5.24")
def test_the_part_alone_is_multiplied(folders: Callable[..., Path]) -> None:
    target = Target(load(folders("glm4_moe", 1)))
    shared = Mtp(draft_vocabulary=7).prepare(target)
    with torch.inference_mode():
        rows = shared.logits(torch.randn(4, 2, target.hidden.size))
    assert rows.shape == (4, 7)
    gemma4, made = taught()
    assert Assistant(path=made, draft_vocabulary=7).prepare(gemma4).head[0].out_features == 7


# -- which tokens ----------------------------------------------------------------------------------------


def ids_of(given: Any, text: Any = None) -> list[int]:
    found: Tensor = drafted_of(given, text, named_target(), "mtp")
    return list(found.tolist())


@cache
def named_target() -> TargetModel:
    target = Target(tiny_llama(vocabulary=257))
    target.tokenizer = byte_tokenizer()
    return target


def test_tokens_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ids_of(5) == ids_of("5") == [0, 1, 2, 3, 4]
    assert ids_of([9, 3, 3, 200]) == ids_of(torch.tensor([200, 3, 9])) == [3, 9, 200]
    (tmp_path / "ids.json").write_text("[8, 2, 30]", "utf-8")
    assert ids_of(tmp_path / "ids.json") == [2, 8, 30]
    mask = torch.zeros(257, dtype=torch.bool).index_fill(0, torch.tensor([4, 100]), True)
    for name, table in (("t2d", mask), ("model.d2t", torch.tensor([4, 99]))):
        save_file({name: table}, tmp_path / "tables.safetensors")
        assert ids_of(str(tmp_path / "tables.safetensors")) == [4, 100]
    # As many as a text's most frequent tokens, then the first ones.
    text = tmp_path / "text.txt"
    text.write_text("banana bandana\n" * 9, "utf-8")
    counts = Counter(byte_tokenizer()("banana bandana\n" * 9).input_ids)
    assert ids_of(3, text) == sorted(token for token, _ in counts.most_common(3))
    monkeypatch.setattr(frequent, "_PIECE", 20)
    assert ids_of(3, text) == sorted(token for token, _ in counts.most_common(3))
    monkeypatch.setattr(frequent, "_COMMON", 8)
    found = ids_of(None, text)
    assert len(found) == common(257) == 64 and {*counts} < {*found}
    assert most_frequent(torch.tensor([0, 2, 0, 1]), 3).tolist() == [0, 1, 3]
    assert common(20) == 8 and common(4) == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none of its ids": ({"draft_vocabulary": [3, 999]}, "must be ids from 0 to 60"),
    "too many": ({"draft_vocabulary": 99}, "must be from 1 to 61, the target's, not 99"),
    "none": ({"draft_vocabulary": 0}, "must be from 1 to 61"),
    "no ids": ({"draft_vocabulary": ["a"]}, "a list of ids.*has none"),
    "true": ({"draft_vocabulary": True}, "a list of ids.*has none"),
    "no file": ({"draft_vocabulary": "no/such.json"}, "there is no file no/such.json"),
    "no text": ({"draft_text": "no/such.txt"}, "there is no file no/such.txt"),
    "both": ({"draft_vocabulary": [3], "draft_text": "text.txt"}, "goes with a number of tokens"),
    "a pickle": ({"draft_vocabulary": __file__}, "a pickle is not read"),
}  # fmt: skip


@since("5.24")
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_tokens_are_refused_in_one_line(folders: Callable[..., Path], case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(OutpaceError, match=message) as caught:
        Mtp(**options).prepare(Target(load(folders("glm4_moe", 1))))
    assert str(caught.value).startswith("mtp: ") and "\n" not in str(caught.value)


@since("5.24")
def test_heads_without_a_part_are_refused(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = taught()
    with pytest.raises(OutpaceError, match="scores a few clusters of the vocabulary already"):
        Assistant(path=assistant(ordered=True), draft_vocabulary=5).prepare(target)
    monkeypatch.setattr(PartialHead, "is_matrix", False)
    with pytest.raises(OutpaceError, match="is no matrix; leave draft_vocabulary"):
        Mtp(draft_vocabulary=5).prepare(Target(load(folders("glm4_moe", 1))))


@since("5.24")
@pytest.mark.parametrize("table", ["mtp.t2d", "model.layers.2.d2t"])
def test_a_checkpoint_may_name_them(tmp_path: Path, table: str) -> None:
    name = "qwen3_5_text" if table.startswith("mtp") else "glm4_moe"

    def change(state: dict[str, Tensor]) -> None:
        mask = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, torch.tensor([1, 2, 50]), False)
        ids = mask.nonzero().flatten()
        state[table] = mask if table.endswith("t2d") else ids - torch.arange(len(ids))

    target = Target(load(write(tmp_path, name, 1, change)))
    steps = drafted(target, "mtp", GREEDY).steps
    assert not {token for step in steps for token in step.draft.tokens} & {1, 2, 50}
    assert (
        Mtp(draft_vocabulary=VOCABULARY).prepare(target).logits(torch.zeros(1, 2, 32)).shape[-1] == VOCABULARY
    )


def test_spec_strings(tmp_path: Path) -> None:
    from outpace.drafters import load_drafter

    (tmp_path / "ids.json").write_text(json.dumps([1, 2]), "utf-8")
    made: Any = load_drafter(f"mtp:draft_vocabulary={tmp_path / 'ids.json'}")
    assert made.draft_vocabulary == str(tmp_path / "ids.json")
    assert load_drafter("assistant:path=x,draft_text=a.txt,draft_vocabulary=32768").trees is False

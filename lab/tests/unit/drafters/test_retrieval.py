"""Retrieval: drafts from a datastore, refusals, and unchanged tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import outpace
from folders import byte_tokenizer, save_llama
from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters import load_drafter
from outpace.draws.noise import Key
from outpace.engine.engine import Engine
from outpace.sequence import Sequence
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import is_chain
from outpace_lab.datastores.header import fingerprint
from outpace_lab.datastores.writer import DatastoreWriter
from outpace_lab.drafters.retrieval.retrieval import Retrieval
from parts import first
from paths import paths

TARGET = ToyTarget()
LONG = SamplingParams(max_new_tokens=100, ignore_eos=True)


def write(file: Path, documents: Seq[Seq[int]], vocabulary: int = 32, memory: int = 1 << 20) -> Path:
    with DatastoreWriter(file, vocabulary, memory) as writer:
        for document in documents:
            writer.add(document)
    return file


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """The target's outputs after other prompts: partly right, partly wrong."""
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=9, ignore_eos=True)
    found = Engine(TARGET).generate([[token] for token in range(1, 32)], params)
    return [generation.tokens for generation in found]


@pytest.fixture(scope="module")
def corpus(texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("retrieval") / "texts.datastore", texts)


@pytest.fixture(scope="module")
def in_shards(texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("retrieval") / "shards.datastore", texts, memory=1000)


def draft(
    file: Path, documents: Seq[Seq[int]], text: Seq[int], eos: frozenset[int] = frozenset(), **options: int
) -> Draft:
    drafter = Retrieval(write(file, documents), **options)
    sequence = Sequence(text, SamplingParams(), Key(0), limit=100, eos_token_ids=eos)
    return drafter.draft(drafter.start(sequence, drafter.prepare(TARGET)))


@pytest.mark.parametrize(
    "options",
    first(
        1,
        [
            {},
            {"min_ngram": 1, "occurrences": 3},
            {"max_ngram": 1, "min_ngram": 1, "max_nodes": 5, "num_speculative_tokens": 2},
            {"max_nodes": 1},
        ],
    ),
)
def test_it_keeps_the_contract(corpus: Path, options: dict[str, int]) -> None:
    check_drafter(Retrieval(corpus, **options))


def test_it_keeps_the_contract_over_shards(in_shards: Path) -> None:
    check_drafter(Retrieval(str(in_shards), min_ngram=1))


@pytest.mark.parametrize("params", [LONG, SamplingParams(max_new_tokens=100, temperature=0.7, seed=3)])
def test_tokens_are_those_of_plain_decoding_in_fewer_steps(corpus: Path, params: SamplingParams) -> None:
    prompts = [[5], [7, 8, 9], [3] * 20]
    plain = Engine(TARGET).generate(prompts, params)
    found = Engine(TARGET, Retrieval(corpus), adaptive=False).generate(prompts, params)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert sum(g.stats.steps for g in found) < 0.7 * sum(g.stats.steps for g in plain)


def test_the_same_drafts_from_shards(corpus: Path, in_shards: Path) -> None:
    stats = [
        Engine(TARGET, Retrieval(file, occurrences=10_000), adaptive=False).generate([[5]], LONG)[0].stats
        for file in (corpus, in_shards)
    ]
    assert (stats[0].steps, stats[0].drafted) == (stats[1].steps, stats[1].drafted)


def test_a_chain_for_the_verifier_of_chains(corpus: Path) -> None:
    drafter = Retrieval(corpus, max_nodes=1, min_ngram=1)
    (found,) = Engine(TARGET, drafter, "rejection").generate([[5]], LONG)
    assert found.stats.accepted > 0
    assert Retrieval(corpus).trees and not drafter.trees


def test_the_most_frequent_continuation_comes_first(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4]] * 3 + [[1, 2, 5, 6]] * 2 + [[9, 2, 7]]
    found = draft(tmp_path / "d", documents, [8, 1, 2])
    assert paths(found) == [(3,), (3, 4), (5,), (5, 6)]
    assert paths(draft(tmp_path / "d", documents, [8, 1, 2], max_nodes=3)) == paths(found)[:3]
    assert paths(draft(tmp_path / "d", documents, [8, 1, 2], num_speculative_tokens=1)) == [(3,), (5,)]
    assert paths(
        draft(tmp_path / "d", documents, [8, 1, 2], max_ngram=1, min_ngram=1, num_speculative_tokens=1)
    ) == [
        (3,),
        (5,),
        (7,),
    ]


def test_drafts_nothing_where_nothing_matches(tmp_path: Path) -> None:
    assert len(draft(tmp_path / "d", [[1, 2, 3]], [4])) == 0
    assert len(draft(tmp_path / "d", [[1, 2, 3]], [9, 1])) == 0
    assert paths(draft(tmp_path / "d", [[1, 2, 3]], [9, 1], min_ngram=1)) == [(2,), (2, 3)]


def test_goes_no_further_than_a_token_that_ends_the_text(tmp_path: Path) -> None:
    documents = [[1, 2, 0, 4], [1, 2, 3, 0, 5]]
    assert paths(draft(tmp_path / "d", documents, [1, 2], eos=frozenset([0]))) == [(0,), (3,), (3, 0)]
    assert len(draft(tmp_path / "d", documents, [1, 2])) == 5


def test_a_single_occurrence_is_a_chain(tmp_path: Path) -> None:
    found = draft(tmp_path / "d", [list(range(1, 30))], [3, 4, 5])
    assert list(found.tokens) == list(range(6, 16)) and is_chain(found.parents)


def test_a_spec_string(corpus: Path) -> None:
    drafter = load_drafter(f"retrieval:path={corpus},max_nodes=8,min_ngram=3")
    assert drafter == Retrieval(str(corpus), max_nodes=8, min_ngram=3)
    with pytest.raises(OutpaceError, match="retrieval needs path"):
        load_drafter("retrieval")


@pytest.mark.parametrize("vocabulary", [33, 400])
def test_a_datastore_with_more_tokens_than_the_target(tmp_path: Path, vocabulary: int) -> None:
    file = write(tmp_path / "d", [[1, 2]], vocabulary)
    with pytest.raises(OutpaceError, match=rf"vocabulary of {vocabulary} tokens, and the target has 32"):
        Engine(TARGET, Retrieval(file))


def test_a_datastore_of_another_vocabulary(tmp_path: Path) -> None:
    file = write(tmp_path / "d", [[1, 2]], 1000)
    Engine(ToyTarget(vocabulary=1050), Retrieval(file))  # rows that make up a round number
    with pytest.raises(OutpaceError, match="the target has 2000"):
        Engine(ToyTarget(vocabulary=2000), Retrieval(file))


def test_a_datastore_of_another_tokenizer(tmp_path: Path) -> None:
    """A vocabulary of the same size with other tokens is refused."""
    folder = save_llama(tmp_path / "model")
    target = outpace.Target(LlamaForCausalLM.from_pretrained(folder))
    vocabulary = byte_tokenizer().get_vocab()
    others = {token: (number + 1) % len(vocabulary) for token, number in vocabulary.items()}
    for name, words in (("own", vocabulary), ("other", others)):
        with DatastoreWriter(
            tmp_path / name, len(words), tokenizer=name, fingerprint=fingerprint(words)
        ) as writer:
            writer.add([1, 2])
    Engine(target, Retrieval(tmp_path / "own"))
    with pytest.raises(
        OutpaceError, match="with the tokenizer of other, and the target's tokenizer has other"
    ):
        Engine(target, Retrieval(tmp_path / "other"))


def test_a_file_that_is_none_is_refused_by_the_engine(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello", "utf-8")
    with pytest.raises(OutpaceError, match="is not a datastore"):
        Engine(TARGET, Retrieval(tmp_path / "text"))
    with pytest.raises(OutpaceError, match="cannot read the datastore"):
        Engine(TARGET, Retrieval(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "options",
    [
        {"min_ngram": 0},
        {"max_ngram": 1},
        {"max_nodes": 0},
        {"num_speculative_tokens": 0},
        {"occurrences": 0},
        {"path": ""},
    ],
)
def test_refuses_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(OutpaceError, match=next(iter(options))):
        Retrieval(**{"path": "x", **options})

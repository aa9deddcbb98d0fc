"""The pipeline: plain decoding is the paper's, and speculation changes only the calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from outpace.core import ContextOverflow, OutpaceError, SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import Output
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget
from outpace_lab.ralm import BM25Retriever, DenseRetriever, RalmGeneration, RalmPipeline, Speculation
from parts import in_turn
from unit.ralm.bases import HashQuery, HashRetriever, Numbers, iterative_text

DOCUMENTS = [[(7 * document + i * i) % 31 + 1 for i in range(5 + document)] for document in range(6)]
PREFIX = [3, 4, 5]
GREEDY = SamplingParams(max_new_tokens=40, seed=0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3)
PENALTY = replace(SAMPLED, repetition_penalty=1.2, presence_penalty=0.6, top_k=12, ignore_eos=True)
SPECULATIONS = [
    Speculation(stride=0, asynchronous=False),
    Speculation(stride=3, prefetch=1, asynchronous=False),
    Speculation(stride=3, prefetch=1),
    Speculation(stride=2, prefetch=6),
    Speculation(stride=40, prefetch=2, asynchronous=False),
    Speculation(),
]


def decode(
    speculation: Speculation | None,
    params: SamplingParams,
    drafter: Any = None,
    retriever: Any = None,
    target: ToyTarget | None = None,
    verifier: str = "match",
    **options: Any,
) -> RalmGeneration:
    engine = Engine(target or ToyTarget(), drafter, verifier, tokenizer=Numbers(), adaptive=False)
    options = {"stride": 3, "query_tokens": 5} | options
    base = retriever or HashRetriever()
    found = RalmPipeline(engine, base, DOCUMENTS, speculation=speculation, **options).generate(PREFIX, params)
    assert engine.sequences == []
    return found


def same(found: RalmGeneration, plain: RalmGeneration) -> bool:
    return (found.tokens, found.text, found.documents, found.finish_reason, found.seed) == (
        plain.tokens,
        plain.text,
        plain.documents,
        plain.finish_reason,
        plain.seed,
    )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALTY])
@pytest.mark.parametrize("drafter", [None, "lookahead:window=3,ngram=3"])
def test_plain_is_a_new_document_every_stride_tokens(params: SamplingParams, drafter: str | None) -> None:
    tokens, documents = iterative_text(ToyTarget(), HashRetriever(), DOCUMENTS, PREFIX, params, 3, 5)
    found = decode(None, params, drafter)
    assert (found.tokens, found.documents) == (tokens, documents)
    assert len(set(documents)) > 2
    assert found.stats.queries == found.stats.batches == found.stats.blocks == len(documents)


def words(text: str) -> list[str]:
    return [f"w{token}" for token in text.split()]


def bm25() -> BM25Retriever:
    class Words(BM25Retriever):
        """Words of a letter at least, which BM25's are: the tokenizer's text is digits."""

        def encode(self, text: str) -> Any:
            return super().encode(" ".join(words(text)))

    return Words([" ".join(f"w{token}" for token in document) for document in DOCUMENTS])


def dense() -> DenseRetriever:
    vectors = np.random.default_rng(1).standard_normal((32, 8))
    texts = [vectors[document].sum(axis=0) for document in DOCUMENTS]
    return DenseRetriever(texts, lambda text: vectors[[int(token) for token in text.split()]].sum(axis=0))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("make", [bm25, dense])
@pytest.mark.parametrize("speculation", [Speculation(stride=3, prefetch=2), Speculation()])
def test_speculation_changes_nothing_with_real_retrievers(
    speculation: Speculation, make: Any, params: SamplingParams
) -> None:
    plain, found = decode(None, params, retriever=make()), decode(speculation, params, retriever=make())
    assert same(found, plain)
    assert len(set(plain.documents)) > 1
    assert found.stats.hits > 0
    if speculation.stride:  # else how much is guessed depends on the clock
        assert found.stats.batches < plain.stats.batches


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALTY])
@pytest.mark.parametrize(
    ("speculation", "drafter"),
    in_turn(SPECULATIONS, [None, "lookahead:window=3,ngram=3", DraftModel(ToyTarget(surprise=0.6))]),
)
def test_speculation_changes_nothing(speculation: Speculation, drafter: Any, params: SamplingParams) -> None:
    assert same(decode(speculation, params, drafter), decode(None, params))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_speculation_changes_nothing_whatever_the_options(data: st.DataObject) -> None:
    draw = data.draw
    speculation = Speculation(
        stride=draw(st.none() | st.integers(0, 6)),
        prefetch=draw(st.integers(1, 6)),
        asynchronous=draw(st.booleans()),
    )
    params = SamplingParams(
        max_new_tokens=draw(st.integers(0, 25)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 99)),
        stop=draw(st.sampled_from([(), (" 1 ", " 12"), (" 3 1",)])),
        stop_token_ids=draw(st.sampled_from([(), (7, 8, 9)])),
    )
    options = {"stride": draw(st.integers(1, 6)), "query_tokens": draw(st.integers(1, 6))}
    target = ToyTarget(context=draw(st.sampled_from([128, 22])))
    seed = draw(st.integers(0, 99))
    drafter = draw(st.sampled_from([None, "prompt_lookup", "jacobi:num_speculative_tokens=4"]))

    def run(how: Speculation | None, drafter: str | None) -> RalmGeneration:
        retriever = HashRetriever(window=2, seed=seed)
        return decode(how, params, drafter, retriever, target, **options)

    assert same(run(speculation, drafter), run(None, None))


def test_a_seed_that_is_drawn_is_reported() -> None:
    found = decode(Speculation(stride=2), replace(SAMPLED, seed=None))
    assert same(found, decode(None, replace(SAMPLED, seed=found.seed)))


def test_counts_when_every_guess_is_right() -> None:
    """14 blocks: one queried alone, then 4 at a time (3 guessed and the next one), the last alone."""
    retriever = HashRetriever()
    stats = decode(Speculation(stride=3, prefetch=6, asynchronous=False), GREEDY, retriever=retriever).stats
    assert retriever.batches == [1, 4, 4, 4, 1]
    assert (stats.batches, stats.queries, stats.blocks) == (5, 14, 14)
    assert (stats.hits, stats.misses, stats.rollbacks, stats.undone) == (13, 0, 0, 0)
    assert stats.steps == 40 == decode(None, GREEDY).stats.steps
    assert stats.hit_rate == 1.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_counts_when_guesses_are_wrong(asynchronous: bool) -> None:
    retriever = HashRetriever()
    speculation = Speculation(stride=3, prefetch=1, asynchronous=asynchronous)
    stats = decode(speculation, SAMPLED, retriever=retriever).stats
    assert stats.rollbacks >= 2
    assert stats.undone >= stats.rollbacks
    assert stats.blocks - stats.undone == 14  # of 3 tokens, the last of 1
    assert (stats.batches, stats.queries) == (len(retriever.batches), sum(retriever.batches))
    assert stats.batches < 14
    assert stats.steps > 40
    assert stats.misses >= stats.rollbacks


def test_time_is_counted_where_it_was_spent() -> None:
    stats = decode(Speculation(stride=2), GREEDY).stats
    assert 0 < stats.seconds_decode < stats.seconds
    assert stats.seconds == stats.seconds_decode + stats.seconds_wait
    assert stats.seconds_search > 0


class Waiting(HashRetriever):
    """Answers only when the target has been run since the query was made."""

    def __init__(self, forward: threading.Event) -> None:
        super().__init__()
        self.forward = forward
        self.waited: list[bool] = []

    def encode(self, text: str) -> HashQuery:
        self.forward.clear()
        return super().encode(text)

    def search(self, queries: Sequence[HashQuery], count: int) -> list[list[int]]:
        # Before the first answer there is nothing to guess, and nothing to decode meanwhile.
        self.waited.append(self.forward.wait(timeout=30 if self.batches else 0))
        return super().search(queries, count)


class Signalling(ToyTarget):
    """Says when it has been run."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event

    def forward(self, *args: Any, **options: Any) -> Output:
        output = super().forward(*args, **options)
        self.event.set()
        return output


def test_a_block_is_decoded_while_the_knowledge_base_searches() -> None:
    event = threading.Event()
    retriever = Waiting(event)
    target = Signalling(event)
    decode(Speculation(stride=0, prefetch=6), GREEDY, retriever=retriever, target=target, stride=10)
    assert retriever.waited == [False, True, True, True]


class Failing(HashRetriever):
    def search(self, queries: Sequence[HashQuery], count: int) -> list[list[int]]:
        if len(self.batches) == 2:
            raise RuntimeError("the knowledge base is gone")
        return super().search(queries, count)


@pytest.mark.parametrize(
    "speculation", [None, Speculation(stride=2), Speculation(stride=2, asynchronous=False)]
)
def test_an_error_of_the_knowledge_base_leaves_the_engine_as_it_was(speculation: Speculation | None) -> None:
    engine = Engine(ToyTarget(), tokenizer=Numbers())
    with pytest.raises(RuntimeError, match="is gone"):
        RalmPipeline(engine, Failing(), DOCUMENTS, speculation=speculation).generate(PREFIX, GREEDY)
    assert engine.sequences == []
    assert (
        engine.generate([PREFIX], GREEDY)[0].tokens
        == Engine(ToyTarget()).generate([PREFIX], GREEDY)[0].tokens
    )


def test_another_sequence_in_the_engine_goes_on() -> None:
    engine = Engine(ToyTarget(), "lookahead:window=3,ngram=3", tokenizer=Numbers(), adaptive=False)
    other = engine.add([9, 9], SAMPLED)
    pipeline = RalmPipeline(
        engine, HashRetriever(), DOCUMENTS, stride=3, query_tokens=5, speculation=Speculation(2, prefetch=1)
    )
    assert same(pipeline.generate(PREFIX, GREEDY), decode(None, GREEDY))
    while other.finish_reason is None:
        engine.step()
    assert other.output == Engine(ToyTarget()).generate([[9, 9]], SAMPLED)[0].tokens


class Misled(HashRetriever):
    """Its scores prefer a document that its searches never put first."""

    def scores(self, query: HashQuery, documents: Sequence[int]) -> list[float]:
        return [float(document) for document in documents]

    def search(self, queries: Sequence[HashQuery], count: int) -> list[list[int]]:
        return [[0, 5][:count] for _ in queries]


def test_a_guess_that_does_not_fit_is_not_tried() -> None:
    target = ToyTarget(context=12)  # document 5 has 10 tokens, the prefix 3
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    speculation = Speculation(stride=2, asynchronous=False)
    options: dict[str, Any] = {"retriever": Misled(), "target": target, "stride": 1}
    found = decode(speculation, params, **options)
    assert found.tokens == decode(None, params, **options).tokens
    assert found.stats.misses == 0


def test_a_document_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ContextOverflow):
        decode(None, GREEDY, target=ToyTarget(context=7))


@pytest.mark.slow
def test_rejection_keeps_the_distribution() -> None:
    """Two tokens, each after a separate document, against the exact distribution."""
    target, seeds = ToyTarget(vocabulary=6, eos=None), 1500
    documents = [[1, 2], [5, 3, 3], [4]]
    base = HashRetriever(documents=3, window=1)
    engine = Engine(
        target, DraftModel(ToyTarget(vocabulary=6, eos=None, surprise=0.5)), "rejection", Numbers()
    )
    pipeline = RalmPipeline(engine, base, documents, stride=1, speculation=Speculation(2, prefetch=1))

    def after(output: list[int]) -> list[float]:
        best = base.search([base.encode(Numbers().decode([1, *output]))], 1)[0][0]
        cache = target.new_cache()
        slot = cache.allocate()
        logits = target.forward(cache, Batch.of({slot: [*documents[best], 1, *output]})).logits_of(slot)
        weights: list[float] = logits[-1].softmax(dim=-1).tolist()
        return weights

    due = {(a, b): p * q for a, p in enumerate(after([])) for b, q in enumerate(after([a]))}
    seen: Counter[tuple[int, ...]] = Counter()
    undone = 0
    for seed in range(seeds):
        found = pipeline.generate([1], SamplingParams(max_new_tokens=2, temperature=1.0, seed=seed))
        seen[tuple(found.tokens)] += 1
        undone += found.stats.undone
    common = [pair for pair in due if due[pair] * seeds >= 5]
    rest = seeds - sum(seen[pair] for pair in common)
    expected = [due[pair] * seeds for pair in common]
    assert undone > 50
    assert chisquare([*(seen[p] for p in common), rest], [*expected, seeds - sum(expected)]).pvalue > 1e-6


def test_a_lossy_verifier_is_said_to_be_lossy() -> None:
    assert not decode(None, GREEDY).stats.lossy
    drafter = DraftModel(ToyTarget(surprise=0.6))
    assert decode(None, GREEDY, drafter, verifier="typical").stats.lossy


class Encoding(ToyTarget):
    has_encoder = True


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stride": 0}, "stride"),
        ({"query_tokens": 0}, "query_tokens"),
        ({"documents": []}, "documents"),
        ({"engine": Engine(ToyTarget())}, "tokenizer"),
        ({"engine": Engine(Encoding(), tokenizer=Numbers())}, "with a decoder-only model"),
    ],
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    given = {"engine": Engine(ToyTarget(), tokenizer=Numbers()), "documents": DOCUMENTS} | options
    with pytest.raises(OutpaceError, match=reason):
        RalmPipeline(retriever=HashRetriever(), **given)


@pytest.mark.parametrize("options", [{"stride": -1}, {"max_stride": -1}, {"prefetch": 0}])
def test_speculation_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(OutpaceError, match=next(iter(options))):
        Speculation(**options)


def test_logprobs_are_refused() -> None:
    with pytest.raises(OutpaceError, match="logprobs"):
        decode(None, replace(GREEDY, logprobs=1))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [([], "for each"), ([[]], "for each"), ([[6]], "document 6"), ([[-1]], "document -1")],
)
def test_answers_of_a_wrong_retriever(answers: list[list[int]], reason: str) -> None:
    class Wrong(HashRetriever):
        def search(self, queries: Sequence[HashQuery], count: int) -> list[list[int]]:
            return answers

    with pytest.raises(OutpaceError, match=reason):
        decode(None, GREEDY, retriever=Wrong())

"""Retrievers: the knowledge base's ranking, the local cache's by the same score, and refusals."""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from outpace.core import OutpaceError
from outpace_lab.ralm import BM25Retriever, DenseRetriever, LocalCache, Retriever
from outpace_lab.ralm.bm25 import words_of
from unit.ralm.bases import HashRetriever

_RANDOM = np.random.default_rng(0)
_WORDS = [f"w{i}" for i in range(60)]
# Few words, so that scores tie; two texts are equal, one is empty.
TEXTS = [" ".join(_RANDOM.choice(_WORDS, size=_RANDOM.integers(3, 30))) for _ in range(300)]
TEXTS += [TEXTS[7], ""]
QUERIES = [" ".join(_RANDOM.choice(_WORDS, size=size)) for size in range(1, 40)] + [
    "",
    "unknown words",
    "w3 w3 W3",
]
VECTORS = _RANDOM.standard_normal((302, 24)).astype(np.float32)
VECTORS[301] = VECTORS[7]


def encode(text: str) -> Any:
    """A text's vector: the sum of its words' vectors; each word's is a document's."""
    numbers = [int(word[1:]) for word in words_of(text) if word in _WORDS]
    return VECTORS[numbers].sum(axis=0)


def bm25() -> BM25Retriever:
    return BM25Retriever(TEXTS)


def dense() -> DenseRetriever:
    return DenseRetriever(VECTORS, encode)


KINDS = pytest.mark.parametrize("make", [bm25, dense])


@KINDS
def test_the_local_cache_scores_as_the_knowledge_base_does(make: Any) -> None:
    """To the last bit, whichever documents are scored together."""
    retriever = make()
    for text in QUERIES:
        query = retriever.encode(text)
        whole = retriever.scores(query, range(302))
        for size in (1, 2, 7, 8, 9, 100):
            some = _RANDOM.choice(302, size=size, replace=False).tolist()
            assert retriever.scores(query, some) == [whole[document] for document in some]
        assert retriever.scores(query, []) == []


def test_bm25_scores_are_those_of_bm25s() -> None:
    retriever = bm25()
    for text in QUERIES:
        query = retriever.encode(text)
        assert retriever.scores(query, range(302)) == retriever._all(query).tolist()


def test_bm25_scores_are_bm25() -> None:
    """Lucene's form of Robertson and Zaragoza 2009, written out, less a factor that is the same for all."""
    k1, b, query = 1.2, 0.6, ["w3", "w5", "w3"]
    corpus = [words_of(text) for text in TEXTS]
    mean = sum(map(len, corpus)) / len(corpus)
    expected = []
    for words in corpus:
        score, counts = 0.0, Counter(words)
        for word in query:
            holding = sum(word in other for other in corpus)
            idf = math.log(1 + (len(corpus) - holding + 0.5) / (holding + 0.5))
            score += idf * counts[word] / (counts[word] + k1 * (1 - b + b * len(words) / mean))
        expected.append(score)
    retriever = BM25Retriever(TEXTS, k1=k1, b=b)
    assert retriever.scores(retriever.encode("w3 W5 w3."), range(302)) == pytest.approx(expected, rel=1e-5)


@KINDS
@pytest.mark.parametrize("count", [1, 5, 64])
def test_search_ranks_by_score_then_by_number(make: Any, count: int) -> None:
    retriever = make()
    queries = [retriever.encode(text) for text in QUERIES]
    for query, found in zip(queries, retriever.search(queries, count), strict=True):
        scores = retriever.scores(query, range(302))
        assert found == sorted(range(302), key=lambda d: (-scores[d], d))[:count]


@KINDS
def test_a_query_gets_the_same_answer_alone_and_in_a_batch(make: Any) -> None:
    retriever = make()
    queries = [retriever.encode(text) for text in QUERIES]
    alone = [retriever.search([query], 1)[0][0] for query in queries]
    assert [documents[0] for documents in retriever.search(queries, 20)] == alone


@pytest.mark.parametrize("make", [bm25, dense, HashRetriever])
def test_the_local_cache_is_right_whenever_it_holds_the_best(make: Any) -> None:
    retriever: Retriever[Any] = make()
    texts = (
        [" ".join(map(str, range(n, n + 3))) for n in range(9)]
        if isinstance(retriever, HashRetriever)
        else QUERIES
    )
    queries = [retriever.encode(text) for text in texts]
    best = [documents[0] for documents in retriever.search(queries, 1)]
    cache = LocalCache(retriever)
    assert cache.best(queries[0]) is None
    cache.add(reversed(best))
    assert len(cache) == len(set(best))
    assert [cache.best(query) for query in queries] == best
    small = LocalCache(retriever)
    small.add([best[0]])
    assert {small.best(query) for query in queries} == {best[0]}


def test_more_documents_than_there_are() -> None:
    assert BM25Retriever(["a b", "b"]).search([np.array([1])], 5) == [[1, 0]]
    retriever = DenseRetriever([[1.0, 0.0], [0.0, 2.0]], lambda text: [1.0, 1.0])
    assert retriever.search([retriever.encode("")], 5) == [[1, 0]]


def test_an_approximate_index() -> None:
    """The best document does not depend on the count, though the index's answer would."""
    import faiss

    index = faiss.IndexHNSWFlat(24, 4, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efSearch = 1
    index.add(VECTORS)
    retriever = DenseRetriever(VECTORS, encode, candidates=8, index=index)
    exact = dense()
    queries = [retriever.encode(text) for text in QUERIES]
    best = [documents[0] for documents in retriever.search(queries, 1)]
    assert [documents[0] for documents in retriever.search(queries, 8)] == best
    assert best != [documents[0] for documents in exact.search(queries, 1)]  # it is approximate


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: BM25Retriever([]), "words"),
        (lambda: BM25Retriever(["", "..."]), "words"),
        (lambda: DenseRetriever([1.0, 2.0], encode), "shape"),
        (lambda: DenseRetriever(np.zeros((0, 4)), encode), "shape"),
        (lambda: DenseRetriever(VECTORS, encode, candidates=0), "candidates"),
        (lambda: DenseRetriever(VECTORS, encode, candidates=4).search([encode("w1")], 5), "more candidates"),
        (lambda: DenseRetriever(VECTORS, lambda text: [1.0]).encode("a"), "shape"),
        (lambda: DenseRetriever(VECTORS, encode, index=dense()._index.__class__(3)), "size 3"),
    ],
)
def test_refusals(make: Any, reason: str) -> None:
    with pytest.raises(OutpaceError, match=reason):
        make()


@pytest.mark.parametrize(("make", "package"), [(bm25, "bm25s"), (dense, "faiss")])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, make: Any, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OutpaceError, match=r"pip install .*\[ralm\]"):
        make()

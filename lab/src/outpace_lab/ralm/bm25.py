"""BM25 over words, by bm25s (Lù 2024, arXiv 2407.03618), in Lucene's variant."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.core import OutpaceError, load_extra

Words = NDArray[np.int64]
Scores = NDArray[np.float32]


def words_of(text: str) -> list[str]:
    """Split a text into runs of letters and digits, in lower case."""
    return re.findall(r"\w+", text.lower())


class BM25Retriever:
    """Ranking of texts by BM25 (Robertson and Zaragoza 2009). A query is the ids of its known words.

    bm25s scores all documents at once, from a matrix with one column of scores per word. ``scores`` sums the
    same columns in the same order and precision, so the two agree to the last bit.

    Args:
        documents: texts, at least one.
        k1: saturation of a word's frequency.
        b: weight of a document's length.
        split: splits a text into words.

    Raises:
        OutpaceError: bm25s is not installed, or no document contains a word.
    """

    def __init__(
        self,
        documents: Sequence[str],
        *,
        k1: float = 1.5,
        b: float = 0.75,
        split: Callable[[str], list[str]] = words_of,
    ) -> None:
        self._split = split
        self._ids: dict[str, int] = {}
        corpus = [[self._ids.setdefault(word, len(self._ids)) for word in split(text)] for text in documents]
        if not self._ids:
            raise OutpaceError("BM25 needs documents with words in them")
        self._count = len(corpus)
        self._index: Any = load_extra("bm25s", "BM25Retriever", "ralm", "outpace-lab").BM25(
            k1=k1, b=b, method="lucene"
        )
        # A copy: bm25s may add a word of its own that has no column.
        self._index.index((corpus, dict(self._ids)), show_progress=False)

    def encode(self, text: str) -> Words:
        return np.array([self._ids[word] for word in self._split(text) if word in self._ids], dtype=np.int64)

    def scores(self, query: Words, documents: Sequence[int]) -> list[float]:
        asked = np.asarray(documents, dtype=np.int64)
        found: Scores = np.zeros(len(asked), dtype=np.float32)
        columns = self._index.scores
        for word in query:
            column = slice(columns["indptr"][word], columns["indptr"][word + 1])
            rows = columns["indices"][column]  # ascending
            places = np.minimum(np.searchsorted(rows, asked), len(rows) - 1)
            holds = rows[places] == asked
            found[holds] += columns["data"][column][places[holds]]
        scores: list[float] = found.tolist()
        return scores

    def search(self, queries: Sequence[Words], count: int) -> list[list[int]]:
        return [_best(self._all(query), count) for query in queries]

    def _all(self, query: Words) -> Scores:
        """Scores of all documents [documents], float32."""
        if not len(query):
            return np.zeros(self._count, dtype=np.float32)
        scores: Scores = self._index.get_scores_from_ids(query)
        return scores


def _best(scores: Scores, count: int) -> list[int]:
    """Indices of the ``count`` highest scores, highest first; ties go to the lower index."""
    candidates = np.arange(len(scores))
    if count < len(scores):
        candidates = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    best: list[int] = candidates[np.argsort(-scores[candidates], kind="stable")[:count]].tolist()
    return best

"""Dense retrieval by inner product, with faiss (Douze et al. 2024, arXiv 2401.08281)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outpace.core import OutpaceError, load_extra

Vector = NDArray[np.float32]


class DenseRetriever:
    """Ranking of documents by the inner product of their vectors with the query's (normalised: cosine).

    faiss rounds its sums differently for one query and for many. It therefore only finds candidates, which
    are then ranked by ``scores``.

    Args:
        vectors: one per document, [documents, size].
        encode: maps a query's text to its vector, [size].
        candidates: documents that faiss finds per query, independent of the count requested, so that the best
            document does not depend on the count, even with an approximate index.
        index: a filled faiss index over the same vectors, possibly approximate (HNSW, IVF); by default an
            exact one is made.

    Raises:
        OutpaceError: faiss is not installed, or the vectors do not fit.
    """

    def __init__(
        self,
        vectors: ArrayLike,
        encode: Callable[[str], ArrayLike],
        *,
        candidates: int = 64,
        index: Any = None,
    ) -> None:
        self._vectors: Vector = np.ascontiguousarray(vectors, dtype=np.float32)
        if self._vectors.ndim != 2 or not self._vectors.size:
            raise OutpaceError(f"vectors must have shape [documents, size], not {self._vectors.shape}")
        if candidates < 1:
            raise OutpaceError(f"candidates must be at least 1, not {candidates}")
        count, size = self._vectors.shape
        self._encode = encode
        self._candidates = min(candidates, count)
        if index is None:
            index = load_extra("faiss", "DenseRetriever", "ralm", "outpace-lab").IndexFlatIP(size)
            index.add(self._vectors)
        if (index.ntotal, index.d) != (count, size):
            raise OutpaceError(
                f"the index holds {index.ntotal} vectors of size {index.d}, but {count} of {size} are given"
            )
        self._index = index

    def encode(self, text: str) -> Vector:
        vector: Vector = np.asarray(self._encode(text), dtype=np.float32)
        if vector.shape != self._vectors.shape[1:]:
            raise OutpaceError(
                f"encode gives a vector of shape {vector.shape}, but documents have {self._vectors.shape[1:]}"
            )
        return vector

    def scores(self, query: Vector, documents: Sequence[int]) -> list[float]:
        # A product and a sum per row: how a matrix product rounds depends on the number of rows.
        rows = self._vectors[np.asarray(documents, dtype=np.int64)].astype(np.float64)
        scores: list[float] = (rows * query).sum(axis=1).tolist()
        return scores

    def search(self, queries: Sequence[Vector], count: int) -> list[list[int]]:
        if self._candidates < min(count, len(self._vectors)):
            raise OutpaceError(
                f"{count} documents are requested, but only {self._candidates} are candidates; "
                "make the retriever with more candidates"
            )
        _, named = self._index.search(np.stack(queries), self._candidates)
        return [self._rank(query, row, count) for query, row in zip(queries, named, strict=True)]

    def _rank(self, query: Vector, named: NDArray[np.int64], count: int) -> list[int]:
        documents = sorted(named[named >= 0].tolist())  # an approximate index pads with -1
        scores = self.scores(query, documents)
        ranked = sorted(zip(scores, documents, strict=True), key=lambda pair: -pair[0])
        return [document for _, document in ranked[:count]]

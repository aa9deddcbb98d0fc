"""Iterative retrieval-augmented generation with speculated documents: same tokens, fewer searches."""

from outpace.ralm.bm25 import BM25Retriever
from outpace.ralm.dense import DenseRetriever
from outpace.ralm.knn import KnnStore, KnnTarget
from outpace.ralm.pipeline import RalmPipeline, Speculation
from outpace.ralm.retriever import LocalCache, Retriever
from outpace.ralm.stats import RalmGeneration, RalmStats

__all__ = [
    "BM25Retriever",
    "DenseRetriever",
    "KnnStore",
    "KnnTarget",
    "LocalCache",
    "RalmGeneration",
    "RalmPipeline",
    "RalmStats",
    "Retriever",
    "Speculation",
]

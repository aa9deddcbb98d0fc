"""Iterative retrieval-augmented generation with speculated documents: same tokens, fewer searches."""

from outpace_lab.ralm.bm25 import BM25Retriever
from outpace_lab.ralm.dense import DenseRetriever
from outpace_lab.ralm.knn import KnnStore, KnnTarget
from outpace_lab.ralm.pipeline import RalmPipeline, Speculation
from outpace_lab.ralm.retriever import LocalCache, Retriever
from outpace_lab.ralm.stats import RalmGeneration, RalmStats

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

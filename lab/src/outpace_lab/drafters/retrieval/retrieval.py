"""REST, retrieval-based speculative decoding (He, Zhong, Cai, Lee, He 2024, arXiv 2311.08252).

The end of the text is looked up in a datastore, a corpus with its suffix array. Its continuations there are
drafted as a tree, the most frequent first (section 3). This needs no model and no training, and works if
the corpus is similar to the text.

Differences from the original: the longest match is found by one bisection, not by one per length; if it
occurs too often to read every place, the places read are spread evenly over all; no continuation crosses
the end of a document; and nothing is drafted after a token that ends the text.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import SequenceDrafter
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel
from outpace.targets.weights.pretrained import load_tokenizer
from outpace_lab.datastores.datastore import Datastore
from outpace_lab.datastores.header import Header, fingerprint
from outpace_lab.drafters.retrieval.frequent import most_frequent

_REBUILD = "build one for the target: outpace datastore build --model NAME"


@dataclass
class RetrievalState:
    """A sequence, and the datastore in which its end is looked up."""

    sequence: Sequence
    datastore: Datastore


@dataclass(frozen=True)
class Retrieval(SequenceDrafter[RetrievalState]):
    """REST: drafts continuations of the last tokens in a corpus, from a datastore on disk.

    Attributes:
        path: a file that `outpace datastore build` wrote.
        max_ngram: the longest end of the text looked up, in tokens, at least 1.
        min_ngram: the shortest match used, in tokens, from 1 to ``max_ngram``.
        max_nodes: maximum number of tokens drafted per step, the nodes of a tree.
        num_speculative_tokens: length of the longest continuation drafted: the depth of that tree.
        occurrences: maximum number of the match's places read.
    """

    path: str | Path
    max_ngram: int = 16
    min_ngram: int = 2
    max_nodes: int = 32
    num_speculative_tokens: int = 10
    occurrences: int = 256

    when: ClassVar[str] = "with a corpus that outputs resemble"
    needs: ClassVar[str] = "a datastore of it"
    paper: ClassVar[str] = (
        "He et al. 2024, REST: Retrieval-Based Speculative Decoding (https://arxiv.org/abs/2311.08252)"
    )

    def __post_init__(self) -> None:
        if not str(self.path):
            raise OutpaceError("retrieval: path must name a file; build one with `outpace datastore build`")
        self.check_least(
            min_ngram=1, max_ngram=self.min_ngram, max_nodes=1, num_speculative_tokens=1, occurrences=1
        )

    @property
    def trees(self) -> bool:
        return self.max_nodes > 1

    def prepare(self, target: TargetModel) -> Datastore:
        """Open the datastore.

        Raises:
            OutpaceError: there is none, it is damaged, or its vocabulary is not the target's: it differs in
                size, or in tokens if the target's tokenizer is in its folder.
        """
        datastore = Datastore(self.path)
        self._check_tokens(datastore.header, target)
        return datastore

    def renew(self, shared: Datastore, target: TargetModel) -> Datastore:
        return shared

    def _check_tokens(self, header: Header, target: TargetModel) -> None:
        held = header.vocabulary
        # A model may have more rows than its tokenizer has tokens, to round their number up.
        if not held <= target.vocabulary <= held + max(64, held // 20):
            raise OutpaceError(
                f"the datastore {self.path} was built for a vocabulary of {held} tokens, and the target "
                f"has {target.vocabulary}; {_REBUILD}"
            )
        tokenizer = load_tokenizer(None, target, needed=False) if header.fingerprint else None
        if tokenizer is not None and fingerprint(tokenizer.get_vocab()) != header.fingerprint:
            raise OutpaceError(
                f"the datastore {self.path} was built with the tokenizer of {header.tokenizer}, and the "
                f"target's tokenizer has other tokens; {_REBUILD}"
            )

    def start(self, sequence: Sequence, shared: Any) -> RetrievalState:
        return RetrievalState(sequence, shared)

    def draft(self, state: RetrievalState) -> Draft:
        tokens = state.sequence.tokens
        found = state.datastore.look_up(
            tokens, self.max_ngram, self.min_ngram, self.occurrences, self.num_speculative_tokens
        )
        return most_frequent(_until(found.continuations, state.sequence.stop_tokens), self.max_nodes)


def _until(continuations: NDArray[np.int64], stops: Set[int]) -> NDArray[np.int64]:
    """The continuations, shape [count, depth], each ended after its first token in ``stops``."""
    stopped = np.logical_or.accumulate(np.isin(continuations, list(stops)), axis=1)
    found = continuations.copy()
    found[:, 1:][stopped[:, :-1]] = -1
    return found

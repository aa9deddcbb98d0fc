"""Knowledge bases for tests, and iterative retrieval written out a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import SamplingParams
from outpace.draws.noise import Key, mix, noisy_argmax
from outpace.draws.sampling import Processor
from outpace.targets import TargetModel
from outpace.targets.batch import Batch
from outpace_lab.ralm import Retriever

HashQuery = tuple[int, ...]


class Numbers:
    """A tokenizer whose text is the token ids in digits."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f" {token}" for token in token_ids)


class HashRetriever:
    """Scores of documents by a hash: 0 to 2 for each of a query's last tokens.

    The best document changes often, but not with every token, and ties are common.

    Attributes:
        batches: the number of queries of each search.
    """

    def __init__(self, documents: int = 6, window: int = 3, seed: int = 0) -> None:
        self.documents = documents
        self.window = window
        self.seed = seed
        self.batches: list[int] = []

    def encode(self, text: str) -> HashQuery:
        return tuple(map(int, text.split()))[-self.window :]

    def scores(self, query: HashQuery, documents: Sequence[int]) -> list[float]:
        return [
            float(sum(mix(self.seed + 1000 * document + token) % 3 for token in query))
            for document in documents
        ]

    def search(self, queries: Sequence[HashQuery], count: int) -> list[list[int]]:
        self.batches.append(len(queries))
        return [self._rank(query)[:count] for query in queries]

    def _rank(self, query: HashQuery) -> list[int]:
        scores = self.scores(query, range(self.documents))
        return sorted(range(self.documents), key=lambda document: (-scores[document], document))


def iterative_text(
    target: TargetModel,
    retriever: Retriever[HashQuery],
    documents: Sequence[list[int]],
    prefix: list[int],
    params: SamplingParams,
    stride: int,
    query_tokens: int,
) -> tuple[list[int], list[int]]:
    """Output and the document of each block, each token from a forward over the whole text."""
    assert params.seed is not None
    output: list[int] = []
    chosen: list[int] = []
    while len(output) < params.max_new_tokens:
        if len(output) % stride == 0:
            query = retriever.encode(Numbers().decode((prefix + output)[-query_tokens:]))
            chosen.append(retriever.search([query], 1)[0][0])
        prompt = documents[chosen[-1]] + prefix
        cache = target.new_cache()
        slot = cache.allocate()
        logits = target.forward(cache, Batch.of({slot: prompt + output})).logits_of(slot)
        processor = Processor(params, prompt)
        for token in output:
            processor.observe(token)
        scores = processor(logits[-1], prompt + output)
        word = Key(params.seed).target(len(output))
        output.append(int(scores.argmax()) if params.greedy else noisy_argmax(scores, word))
        if output[-1] in target.eos_token_ids and not params.ignore_eos:
            break
    return output, chosen

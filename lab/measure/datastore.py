"""Benchmark of a large datastore: time and memory of building, size, and time of a look-up.

    python lab/measure/datastore.py --tokens 100_000_000 --out datastore.json

The texts are synthetic: tokens and repeated passages, both with frequencies by Zipf's law. Look-ups follow
texts of the same kind that are not in the datastore, token by token, as requests do; each is a full step of
the drafter, the tree included. Two processes then look up the same texts at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.bench.machine import machine
from outpace.core import SamplingParams
from outpace.draws.noise import Key
from outpace.sequence import Sequence
from outpace_lab.datastores.datastore import Datastore
from outpace_lab.datastores.writer import DatastoreWriter
from outpace_lab.drafters.retrieval.retrieval import Retrieval, RetrievalState

DOCUMENT = 1000  # tokens
PASSAGE = 40


@dataclass(frozen=True)
class Corpus:
    """Documents of passages: half of them new, half from a store of passages."""

    vocabulary: int
    passages: int
    seed: int

    def documents(self, tokens: int, part: int) -> Iterator[NDArray[np.int64]]:
        """Documents with ``tokens`` tokens in total; each ``part`` has other tokens but the same passages."""
        store = self._words(np.random.default_rng(self.seed), self.passages * PASSAGE).reshape(-1, PASSAGE)
        often = _shares(self.passages)
        random = np.random.default_rng((self.seed, part))
        for _ in range(-(-tokens // DOCUMENT)):
            text = self._words(random, DOCUMENT).reshape(-1, PASSAGE)
            known = random.random(len(text)) < 0.5
            text[known] = store[np.searchsorted(often, random.random(int(known.sum())))]
            yield text.reshape(-1)

    def _words(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        return np.searchsorted(_shares(self.vocabulary), random.random(count)).astype(np.int64)


def _shares(kinds: int) -> NDArray[np.float64]:
    """Cumulative distribution of Zipf's law: the share of the n most frequent kinds."""
    share = 1 / np.arange(1, kinds + 1)
    return np.cumsum(share / share.sum())


def build(file: Path, corpus: Corpus, tokens: int, memory: int) -> dict[str, Any]:
    """Build a datastore; run it in a separate process, so that the process's memory is the build's."""
    before = _peak()
    seconds_sources = 0.0
    began = read = time.perf_counter()
    with DatastoreWriter(file, corpus.vocabulary, memory) as writer:
        for document in corpus.documents(tokens, part=0):
            seconds_sources += time.perf_counter() - read
            writer.add(document)
            read = time.perf_counter()
    return {
        "seconds": time.perf_counter() - began - seconds_sources,
        "seconds_making_the_texts": seconds_sources,
        "peak_bytes": _peak(),
        "peak_bytes_before": before,
        "file_bytes": file.stat().st_size,
        "tokens": writer.tokens,
        "documents": writer.documents,
        "shards": writer.shards,
    }


def _peak() -> int:
    """Peak resident memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def look_up(file: Path, corpus: Corpus, steps: int, options: dict[str, int]) -> dict[str, Any]:
    """Open the datastore and draft after each token of texts that are not in it."""
    began = time.perf_counter()
    drafter = Retrieval(file, **options)
    datastore = Datastore(file)
    seconds_open = time.perf_counter() - began
    seconds, seconds_cpu, matches = [], [], []
    drafted = agreed = 0
    for document in corpus.documents(steps, part=1):
        text = document.tolist()
        sequence = Sequence(text[:32], SamplingParams(), Key(0), limit=DOCUMENT)
        state = RetrievalState(sequence, datastore)
        for token in text[32:]:
            began, began_cpu = time.perf_counter(), time.thread_time()
            draft = drafter.draft(state)
            seconds_cpu.append(time.thread_time() - began_cpu)
            seconds.append(time.perf_counter() - began)
            drafted += len(draft)
            agreed += any(
                parent < 0 and guess == token
                for guess, parent in zip(draft.tokens, draft.parents, strict=True)
            )
            matches.append(datastore.look_up(sequence.tokens).length)
            sequence.tokens.append(token)
    first, later = seconds[:100], seconds[100:]
    return {
        "seconds_open": seconds_open,
        "steps": len(seconds),
        "seconds_median": float(np.median(later)),
        "seconds_99th_percentile": float(np.quantile(later, 0.99)),
        "cpu_seconds_median": float(np.median(seconds_cpu[100:])),
        "cpu_seconds_99th_percentile": float(np.quantile(seconds_cpu[100:], 0.99)),
        "seconds_median_of_the_first_100": float(np.median(first)),
        "mean_match": float(np.mean(matches)),
        "drafted": drafted,
        "next_token_drafted": agreed / len(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--passages", type=int, default=100_000, help="number of repeated passages")
    parser.add_argument("--memory", type=float, default=2.0, help="for sorting, in GB")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="a note, copied into the result")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    given = parser.parse_args()
    corpus = Corpus(given.vocabulary, given.passages, given.seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "synthetic.datastore"
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(1) as pool:
            built = pool.apply(build, (file, corpus, given.tokens, int(given.memory * 2**30)))
        print(json.dumps(built), file=sys.stderr, flush=True)
        with spawn.Pool(1) as pool:
            alone = pool.apply(look_up, (file, corpus, given.steps, {}))
        print(json.dumps(alone), file=sys.stderr, flush=True)
        with spawn.Pool(2) as pool:
            both = pool.starmap(look_up, [(file, corpus, given.steps, {})] * 2)
    counts = ("steps", "mean_match", "drafted", "next_token_drafted")
    assert all(one[name] == alone[name] for one in both for name in counts), (
        "two processes found different continuations"
    )
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine("cpu"),
        "note": given.note,
        "corpus": asdict(corpus),
        "build": built,
        "look_up": alone,
        "look_up_in_two_processes_at_once": both,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Losslessness of drafters that are trained for SmolLM2-135M-Instruct, and of the laboratory's others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from learning import train
from lossless import test_real
from lossless.test_real import MIXED, QUESTIONS, Case, check
from outpace import Engine
from outpace.loading import Loaded
from outpace_lab.datastores.writer import DatastoreWriter
from outpace_lab.train.data import Document
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.reading import read_batch

pytestmark = test_real.pytestmark

# Fixtures.
float64, bfloat16, case = test_real.float64, test_real.bfloat16, test_real.case

# Names in braces are entries of ``files``. Each has drafts accepted and drafts rejected, parallel_tokens too,
# which has its untrained embeddings.
SPECS = [
    "retrieval:path={datastore},min_ngram=1,max_nodes=8",
    "token_recycling:max_nodes=16,top_k=4",
    "combined:(lookahead:window=3,ngram=3,guesses=3)+(prompt_lookup)+(token_recycling),row_cost=0",
    "draft_model:model={draft_model},num_speculative_tokens=3",
    "draft_model:model={draft_model},num_speculative_tokens=2,branching=2x2",
    "cascade:draft=(draft_model:model={draft_model}),inner=(retrieval:path={datastore}),tail=2",
    "blockwise:path={blockwise}",
    "medusa:path={medusa},max_nodes=8",
    "hydra:path={hydra},max_nodes=8",
    "eagle:path={eagle}",
    "eagle:path={eagle},expand=2,max_nodes=6",
    "dflash:path={dflash}",
    "spec_drafter:path={spec_drafter}",
    "self_speculative:skip=10+20,num_speculative_tokens=3",
    "early_exit:layers=27,num_speculative_tokens=2,min_confidence=0.1",
    "early_exit:path={early_exit},num_speculative_tokens=3,min_confidence=0.1",
    "windowed:sinks=2,recent=16,num_speculative_tokens=2",
    "parallel_tokens:num_speculative_tokens=2",
]
SMALL: dict[str, dict[str, Any]] = {
    "blockwise": {"heads": 2, "width": 0.25, "draft_vocabulary": 64},
    "dflash": {"depth": 1, "intermediate_size": 64, "tokens": 3, "draft_vocabulary": 64},
    "draft_model": {"hidden_size": 128, "depth": 1},
    "eagle": {"intermediate_size": 64, "steps": 2, "own_head": False, "draft_vocabulary": 64},
    "early_exit": {"layers": 20, "draft_vocabulary": 64},
    "hydra": {"heads": 2, "layers": 1, "draft_vocabulary": 64},
    "medusa": {"heads": 2, "draft_vocabulary": 64},
    "spec_drafter": {"hidden_size": 128, "depth": 1, "tokens": 3},
}


@pytest.fixture(scope="module")
def files(float64: Loaded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A datastore of two of the model's answers, and a drafter of each method that learns them a little."""
    folder, target = tmp_path_factory.mktemp("real"), float64.target
    prompts = [float64.encode(question, chat=True) for question in QUESTIONS[:2]]
    found = Engine(target).generate(prompts, MIXED[:2])
    texts = [Document((*p, *g.tokens), len(p)) for p, g in zip(prompts, found, strict=True)]
    learnt = torch.tensor([token for own in found for token in own.tokens])
    with DatastoreWriter(folder / "datastore", target.vocabulary) as writer:
        for text in texts:
            writer.add(text.tokens)
    for method, options in SMALL.items():
        cls = LEARNED[method]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = cls.new(cls.config_type(**options), target)
        module.suit(learnt.bincount(minlength=target.vocabulary))
        train(module, read_batch(target, [texts], module.hidden_layers), 20)
        module.save(folder / method)
    return {name: folder / name for name in ("datastore", *SMALL)}


@pytest.mark.parametrize("drafter", SPECS)
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    case: Case, files: dict[str, Path], drafter: str
) -> None:
    check(case, drafter.format(**files))

"""Drafts for SGLang's batches: trees of a fixed number of nodes, and what drafters are told of each step.

SGLang verifies as many nodes per request in every step. A tree with fewer is filled up with nodes that no
path leads to, so they are never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters import load_drafter
from outpace.drafters.base import Drafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.draws.logits import DrawnTokens
from outpace.draws.noise import Key
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel

HOSTED = ("lookahead", "prompt_lookup", "suffix", "token_recycling")


class HostedModel(TargetModel):
    """The target as far as the hosted drafters ask about it; SGLang itself runs the model.

    Args:
        config: SGLang's ``ModelConfig``.
        device: the device that the model is on.
    """

    def __init__(self, config: Any, device: str) -> None:
        self.vocabulary = config.vocab_size
        self.context = config.context_len
        self.eos_token_ids = frozenset(config.hf_eos_token_id or ())
        self.device = torch.device(device)

    def new_cache(self, *args: Any, **options: Any) -> Any:
        raise OutpaceError("SGLang runs the model and keeps its cache; use outpace.Engine to decode here")

    def forward(self, *args: Any, **options: Any) -> Any:
        raise OutpaceError("SGLang runs the model and keeps its cache; use outpace.Engine to decode here")


@dataclass(eq=False)
class Request:
    """A request of SGLang's: its text, the drafter's state, and the latest draft."""

    sequence: Sequence
    state: Any
    draft: Draft = field(default_factory=Draft)


class Drafts:
    """The drafter's states of the requests in SGLang's batches.

    Args:
        nodes: nodes per tree, the root included.
    """

    def __init__(self, drafter: Drafter[Any], model: HostedModel, nodes: int) -> None:
        self.drafter, self.nodes = drafter, nodes
        self._model, self._length = model, int(model.context or 0)
        self._shared = drafter.prepare(model)
        self._requests: dict[str, Request] = {}

    @property
    def columns(self) -> int:
        """The target's most probable tokens that ``learn`` needs after each node."""
        return max(1, self.drafter.reads_top)

    def get(
        self, names: Seq[str], prompts: Seq[Seq[int]], outputs: Seq[Seq[int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draft for each row of a batch.

        Args:
            names: SGLang's request ids.
            prompts, outputs: the tokens of each request; the last one is the root of its tree.

        Returns:
            the trees' tokens, [rows * nodes], and their ancestor masks, [rows * nodes * nodes]: True at
            [i, j] if node j is node i or an ancestor of it.
        """
        requests = [self._of(*row) for row in zip(names, prompts, outputs, strict=True)]
        for request in requests:
            request.sequence.budget = self.nodes - 1
        drafts = self.drafter.propose([request.state for request in requests])
        tokens = np.empty((len(names), self.nodes), np.int64)
        masks = np.zeros((len(names), self.nodes, self.nodes), np.bool_)
        for row, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            count = min(len(draft), self.nodes - 1)
            request.draft = Draft(tuple(draft.tokens[:count]), tuple(draft.parents[:count]))
            tokens[row] = request.sequence.tokens[-1]
            tokens[row, 1 : count + 1] = request.draft.tokens
            masks[row] = np.eye(self.nodes, dtype=np.bool_)
            for node, parent in enumerate(request.draft.parents, 1):
                masks[row, node] |= masks[row, parent + 1]
        return tokens.reshape(-1), masks.reshape(-1)

    def _of(self, name: str, prompt: Seq[int], output: Seq[int]) -> Request:
        """A request with exactly this text: one that SGLang changed by other means starts again."""
        request = self._requests.get(name)
        if request is not None:
            sequence = request.sequence
            if sequence.prompt_length == len(prompt) and sequence.output == list(output):
                return request
            self.drafter.stop(request.state)
        limit, ends = self._length - len(prompt), self._model.eos_token_ids
        sequence = Sequence(prompt, SamplingParams(), Key(0), limit, ends, output=output)
        request = self._requests[name] = Request(sequence, self.drafter.start(sequence, self._shared))
        return request

    def learn(self, names: Seq[str], emitted: Seq[Seq[int]], best: NDArray[np.int64]) -> None:
        """Tell the drafter the outcome of a step.

        Args:
            names: the requests that ``get`` drafted for.
            emitted: the tokens that the step emitted for each.
            best: the target's most probable tokens after each node, [rows, nodes, columns].
        """
        states, steps = [], []
        for name, tokens, told in zip(names, emitted, best, strict=True):
            request = self._requests.get(name)
            if request is None or not tokens:
                continue
            sequence, draft = request.sequence, request.draft
            request.draft = Draft()
            root = sequence.output_length
            for token in tokens:
                sequence.append(token)
            rows = told[: len(draft) + 1].astype(np.int32)
            table = DrawnTokens(np.concatenate([rows[:, :1], rows], axis=1), plain=True)
            states.append(request.state)
            steps.append(
                Step(
                    draft,
                    range(len(draft)),
                    accepted(draft, tokens),
                    list(tokens),
                    table,
                    root,
                    sequence,
                    hidden={},
                    own=table.own,
                )
            )
        self.drafter.observe(states, steps)

    # -- the methods of SGLang's corpus that its worker calls --------------------------------------------

    def erase_match_state(self, names: Seq[str]) -> None:
        """Forget requests that left the batch."""
        for name in names:
            request = self._requests.pop(name, None)
            if request is not None:
                self.drafter.stop(request.state)

    def reset(self) -> None:
        """Forget all requests."""
        self.erase_match_state(list(self._requests))


def accepted(draft: Draft, emitted: Seq[int]) -> list[int]:
    """The path of a draft that begins with the emitted tokens, the last of which no node proposed."""
    children = {
        (parent, token): node
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
    }
    path: list[int] = []
    last = -1
    for token in emitted[:-1]:
        last = children[last, token]
        path.append(last)
    return path


def hosted_drafter(spec: str, nodes: int) -> Drafter[Any]:
    """The drafter of a spec string.

    Args:
        nodes: nodes per tree, the root included.

    Raises:
        OutpaceError: it cannot draft in SGLang.
    """
    drafter = load_drafter(spec)
    parts = drafter.parts if isinstance(drafter, Combined) else (drafter,)
    for part in parts:
        if part.name not in HOSTED:
            names = ", ".join([*HOSTED, Combined.name])
            raise OutpaceError(
                f"{part.name} cannot draft in SGLang: it needs the target's logits or hidden states, "
                f"another model, or texts that SGLang's requests lack; use one of: {names}"
            )
        least = part.widths[0] + 1 if isinstance(part, Lookahead) else 2
        if nodes < least:
            raise OutpaceError(
                f"{part.name} needs {least} nodes, and SGLang verifies {nodes}: set "
                f"--speculative-num-draft-tokens to {least} or more"
                + (", or give it a smaller window" if least > 2 else "")
            )
    return drafter

"""Decoding by dictation: a drafter's drafts for a target that emits a given text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from outpace.core import Draft, SamplingParams
from outpace.drafters.base import Drafter
from outpace.draws.logits import Logits
from outpace.draws.noise import Key
from outpace.sequence import Sequence, Step
from outpace.tree import children, select


@dataclass
class Dictation:
    """A sequence whose target emits ``text`` after ``prompt``, and the draft of each step."""

    drafter: Drafter[Any]
    text: Seq[int]
    prompt: Seq[int] = (99,)
    references: Seq[Seq[int]] = ()
    eos: int | None = None
    shared: Any = None
    drafts: list[Draft] = field(default_factory=list)
    emitted: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sequence = Sequence(
            self.prompt,
            SamplingParams(),
            Key(0),
            limit=len(self.text),
            eos_token_ids=frozenset(() if self.eos is None else (self.eos,)),
            references=self.references,
        )
        self.state = self.drafter.start(self.sequence, self.shared)

    def step(self, plain: bool = False, nodes: int | None = None) -> list[int]:
        """One step, without a draft where it is to be plain; the tokens that it emits.

        Args:
            nodes: how many of the draft are verified, its first ones; None for all.
        """
        (proposal,) = [Draft()] if plain else self.drafter.propose([self.state])
        draft = select(proposal, range(len(proposal))[:nodes])
        below, node, path, tokens = children(draft.parents), -1, [], []
        while True:
            token = self.text[self.sequence.output_length]
            tokens.append(token)
            more = self.sequence.append(token)
            node = next((child for child in below[node] if draft.tokens[child] == token), -1)
            if node < 0:
                break
            path.append(node)
            if not more:
                break
        step = Step(
            draft=draft,
            kept=range(len(draft)),
            path=path,
            tokens=tokens,
            logits=Logits(torch.empty(len(draft) + 1, 0)),
            root=self.sequence.output_length - len(tokens),
            sequence=self.sequence,
            hidden={},
        )
        self.drafter.observe([self.state], [step])
        self.drafts.append(proposal)
        self.emitted.append(tokens)
        return tokens

    def run(self) -> int:
        """Steps to the end of the text."""
        while self.sequence.finish_reason is None:
            self.step()
        self.drafter.stop(self.state)
        return len(self.emitted)

"""Early exit: the target's first layers and a small adapter draft; the verification goes on from there.

SPEED (Hooper et al. 2023) and Kangaroo (Liu et al. 2024). The lower layers run over one token after another;
from their hidden state an adapter and the target's own norm and head guess the next. Keys, values and hidden
states of the lower layers are kept, and the upper layers verify the whole chain from them, so a draft costs
the lower layers nothing besides. A chain ends early where the guess is not confident (Kangaroo's second early
exit).

What differs from the papers: by default drafts are drawn with the target's own noise. Kangaroo's adapter is a
layer of attention between two norms; this one is a feed-forward layer between two norms, so that it has no
keys and values of its own to keep. Without an adapter the lower layers' hidden state is read by the target's
norm and head as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafting.draws import Draws, Noise, check_noise
from outpace.drafting.growth import Growth
from outpace.drafting.learned import (
    Batch,
    Fit,
    Learned,
    Losses,
    Objective,
    accepted_of_chain,
    measure,
    read_config,
)
from outpace.drafting.shapes import shape_of
from outpace.drafting.vocabulary import Vocabulary
from outpace.drafting.within import Within, draft_chains, place_of
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.targets.split import SplitTarget


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter.

    Attributes:
        layers: of the target that run before it; at least 1.
        width: of its hidden layer, relative to the target's hidden size; above 0.
        num_draft_tokens: of the chains that held-out texts are measured by; at least 1.
        min_confidence: likewise, the probability below which a chain ends, in [0, 1].
    """

    layers: int = 2
    width: float = 2.0
    num_draft_tokens: int = 6
    min_confidence: float = 0.6

    def __post_init__(self) -> None:
        if self.layers < 1 or self.width <= 0 or self.num_draft_tokens < 1:
            raise OutpaceError(
                "early_exit: layers and num_draft_tokens must be at least 1, and width above 0"
            )
        if not 0 <= self.min_confidence <= 1:
            raise OutpaceError(
                f"early_exit: min_confidence must be between 0 and 1, not {self.min_confidence}"
            )


class Adapter(Learned):
    """From the state of a lower layer to that of the last: a residual feed-forward layer, and a norm."""

    method: ClassVar[str] = "early_exit"
    config_type: ClassVar[type[Any]] = AdapterConfig

    def __init__(self, config: AdapterConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        size = fit.hidden_size
        self.before = nn.RMSNorm(size, eps=1e-6)
        self.up = nn.Linear(size, max(1, round(config.width * size)))
        self.down = nn.Linear(self.up.out_features, size)
        self.after = nn.RMSNorm(size, eps=1e-6)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.config.layers,)

    def rows(self, states: Tensor) -> Tensor:
        """Logits [..., vocabulary] of the next token, from what came out of the lower layers."""
        own = states.to(self.up.weight.dtype)
        own = own + self.down(nn.functional.silu(self.up(self.before(own))))
        return self.target.head(self.after(own))

    def loss(self, batch: Batch, objective: Objective) -> Losses:
        at, places = batch.ahead(1).nonzero(as_tuple=True)
        draft = self.rows(batch.hidden[self.config.layers][at, places])
        return measure(objective, [(draft, batch.logits[at, places], batch.tokens[at, places + 1])], [1.0])

    @torch.no_grad()
    def accepted(self, batch: Batch) -> Tensor:
        # While a chain is right, its rows are those of the text: one guess a place is all there is to know.
        rows = self.rows(batch.hidden[self.config.layers]).float()
        best = rows.argmax(dim=-1)
        sure = rows.max(dim=-1).values - rows.logsumexp(dim=-1)
        best[sure.exp() < self.config.min_confidence] = -1
        depth = self.config.num_draft_tokens
        guesses = torch.full((*best.shape, depth), -1, dtype=best.dtype, device=best.device)
        for ahead in range(min(depth, best.shape[1])):
            guesses[:, : best.shape[1] - ahead, ahead] = best[:, ahead:]
        return accepted_of_chain(batch, guesses)


@dataclass(frozen=True, kw_only=True)
class ExitShared(Growth):
    """What the sequences of one engine share: the target in two parts."""

    target: SplitTarget
    adapter: Adapter | None

    @torch.inference_mode()
    def step(self, states: Seq[Within]) -> Tensor:
        """Logits [n, vocabulary] after the last token of each chain."""
        slots = [state.place.slot for state in states]
        hidden = self.target.advance(states[0].place.cache, slots, [state.last for state in states])
        return self.target.read_out(hidden) if self.adapter is None else self.adapter.rows(hidden)


@dataclass(frozen=True)
class EarlyExit(Drafter[Within]):
    """The target's first layers.

    Attributes:
        path: the folder that ``outpace train early_exit`` wrote, or the adapter itself; None drafts without.
        layers: how many of the target's layers draft, at least 1 and not all; by default the adapter's, or 2.
        num_draft_tokens: tokens in the chain, at least 1.
        min_confidence: in [0, 1]: the chain goes on only where the best token has at least this probability.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with noise of its own; "greedy": its most probable tokens.
    """

    path: Any = field(default=None, repr=False)
    layers: int | None = None
    num_draft_tokens: int = 6
    min_confidence: float = 0.6
    draws: Noise = "coupled"

    paper: ClassVar[str] = (
        "Hooper et al. 2023, SPEED: Speculative Pipelined Execution for Efficient Decoding (arXiv "
        "2310.12072); Liu et al. 2024, Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting "
        "(arXiv 2404.18911)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("layers", "num_draft_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OutpaceError(f"early_exit: {name} must be at least 1, not {value}")
        check_noise("early_exit", self.draws)
        if not 0 <= self.min_confidence <= 1:
            raise OutpaceError(
                f"early_exit: min_confidence must be between 0 and 1, not {self.min_confidence}"
            )

    def attach(self, target: TargetModel) -> SplitTarget:
        return SplitTarget(target, self._depth())

    def _depth(self) -> int:
        """How many layers draft: an adapter is for the layer that it was trained on."""
        if self.path is None:
            return 2 if self.layers is None else self.layers
        if isinstance(self.path, Adapter):
            own = self.path.config.layers
        else:
            own = int(read_config(self.path, Adapter.method)["config"]["layers"])
        if self.layers not in (None, own):
            raise OutpaceError(
                f"early_exit: the adapter is for {own} layers, not {self.layers}; leave layers out"
            )
        return int(own)

    def prepare(self, target: TargetModel) -> ExitShared:
        if not isinstance(target, SplitTarget):
            raise OutpaceError("early_exit splits the target, so it drafts alone: use it by itself")
        return ExitShared(
            vocabulary=Vocabulary(),
            shape=shape_of(self.num_draft_tokens, method="early_exit"),
            draws=Draws(self.draws, weigh=self.min_confidence > 0),
            least=math.log(self.min_confidence) if self.min_confidence else -math.inf,
            by_path=False,
            target=target,
            adapter=None if self.path is None else Adapter.of(self.path, target.inner),
        )

    def start(self, sequence: Sequence, shared: ExitShared) -> Within:
        return Within(sequence, shared, place_of(sequence, "early_exit"))

    def stop(self, state: Within) -> None:
        shared = state.shared
        assert isinstance(shared, ExitShared)
        shared.target.forget([state.place.slot])

    def propose(self, states: Seq[Within]) -> list[Draft]:
        if not states:
            return []
        shared = states[0].shared
        assert isinstance(shared, ExitShared)
        shared.target.forget([state.place.slot for state in states])
        return draft_chains(states, shared.step)

    def observe(self, states: Seq[Within], steps: Seq[Step]) -> None:
        pass

"""A target split into lower layers, which may draft ahead, and upper layers, which continue from them.

Verification reuses what the lower layers computed for a draft: their keys and values are already in the
cache, and their hidden states are the upper layers' input. No row goes through a layer twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.cache import Cache, KVCache, Slot
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.around import AroundTarget
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.inputs.config import family
from outpace.targets.inputs.surgery import stack_of
from outpace.targets.rows import Output, Rows
from outpace.targets.step.agreement import agree
from outpace.targets.stock.causal import CausalTarget


@dataclass
class Held:
    """A chain after a slot's committed rows that the lower layers have processed.

    Attributes:
        states: the lower layers' outputs, each [hidden size].
    """

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    def shared(self, row: Rows) -> int:
        """Number of leading rows of a feed that equal this chain's."""
        if row.fed:
            return 0
        count = 0
        for token, held, parent in zip(row.tokens, self.tokens, row.tree, strict=False):
            if token != held or parent != count - 1:
                break
            count += 1
        return count


class SplitTarget(AroundTarget):
    """A decoder-only model, split below one of its layers; its logits are those of the whole model.

    Use it in one engine only, since it stores the chains that its lower layers are ahead by.

    Args:
        target: the model, a plain stack of layers.
        depth: number of lower layers, from 1 to all but one.

    Raises:
        OutpaceError: the depth is out of range. UnsupportedModel: the model is not a plain stack of layers,
            or its parts do not give the logits of the whole.
    """

    inner: CausalTarget

    def __init__(self, target: TargetModel, depth: int) -> None:
        if not isinstance(target, CausalTarget):
            raise UnsupportedModel(f"a {type(target).__name__} cannot be split; pass a transformers model")
        if not 1 <= depth < target.layers:
            raise OutpaceError(
                f"the model has {target.layers} layers: the lower ones are 1 to {target.layers - 1} of them, "
                f"not {depth}"
            )
        self.wrap(target)
        self.depth = depth
        self._lower = target.some_layers(range(depth), bare=True)
        self._upper = target.some_layers(range(depth, target.layers))
        self._held: dict[Slot, Held] = {}
        self._check()

    def some_layers(self, layers: Sequence[int]) -> TargetModel:
        return self.inner.some_layers(layers)

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> KVCache:
        return self.inner.new_cache(slots, length, capacity)

    # -- ahead of the verification -----------------------------------------------------------------------

    def advance(self, cache: Cache, slots: Sequence[Slot], tokens: Sequence[int]) -> Tensor:
        """Run the lower layers over one more row per slot, after the rows that they are ahead by.

        Returns:
            The hidden states after them, [n, hidden size].
        """
        with cache.provisional({slot: len(held.tokens) for slot, held in self._held.items()}):
            output = self._lower.forward(
                cache, Batch.of({slot: [token] for slot, token in zip(slots, tokens, strict=True)})
            )
            cache.keep(dict.fromkeys(slots, (0,)))
        found = torch.cat([output.logits_of(slot) for slot in slots])
        for slot, token, state in zip(slots, tokens, found, strict=True):
            held = self._held.setdefault(slot, Held())
            held.tokens.append(token)
            held.states.append(state)
        return found

    def forget(self, slots: Sequence[Slot] | None = None) -> None:
        """Drop the chains that the lower layers are ahead by in these slots; None for all."""
        for slot in list(self._held) if slots is None else slots:
            self._held.pop(slot, None)

    def read_out(self, states: Tensor) -> Tensor:
        """Logits of hidden states [..., hidden size], through the model's norm and head."""
        return self.head(stack_of(self.model).norm(states))

    # -- the forward -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        if any(layer != self.depth for layer in hidden_layers):
            raise OutpaceError(
                f"a target that is split gives the hidden states of layer {self.depth} alone, not of "
                f"{list(hidden_layers)}; use another drafter beside it"
            )
        feeds = batch.rows
        held = {slot: self._held.pop(slot, Held()) for slot in feeds}
        counts = {slot: held[slot].shared(row) for slot, row in feeds.items()}
        if not any(counts.values()) and not hidden_layers:  # nothing to continue from: one forward, not two
            return self.inner.forward(cache, batch)
        rest = {
            slot: _rest(row, counts[slot]) for slot, row in feeds.items() if counts[slot] < len(row.tokens)
        }
        parts: dict[Slot, list[Tensor]] = {
            slot: [torch.stack(chain.states[: counts[slot]])] if counts[slot] else []
            for slot, chain in held.items()
        }
        if rest:
            with cache.provisional(counts):
                late = self._lower.forward(cache, Batch.of(rest))
                cache.keep({slot: range(len(row.tokens)) for slot, row in rest.items()})
            for slot in rest:
                parts[slot].append(late.logits_of(slot))
        states = {slot: torch.cat(pieces) for slot, pieces in parts.items() if pieces}
        output = self._upper.run(cache, batch, states=states)
        hidden = {slot: dict.fromkeys(hidden_layers, rows) for slot, rows in states.items()}
        return Output(output.logits, output.spans, hidden)

    # -- construction ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare the parts' logits with the whole's, for a prompt and a tree that begins with a draft."""
        ids = [1 + number % (self.vocabulary - 1) for number in range(12)]
        prompts, tree = [ids[:3], ids[3:5]], Rows(ids[5:9], (-1, 0, 1, 0))
        answers: list[list[Tensor]] = []
        for target in (self.inner, self):
            cache = target.new_cache(slots=2, length=16)
            slots = [cache.allocate(), cache.allocate()]
            feeds = {slot: Rows(prompt) for slot, prompt in zip(slots, prompts, strict=True)}
            target.forward(cache, Batch.of(feeds, None))
            cache.keep({slot: range(len(row.tokens)) for slot, row in feeds.items()})
            if target is self:
                for token in tree.tokens[:2]:
                    self.advance(cache, slots[:1], [token])
            fed = {slots[0]: tree, slots[1]: Rows(ids[9:12])}
            output = target.forward(cache, Batch.of(fed))
            answers.append([output.logits_of(slot).clone() for slot in slots])
            if target is self.inner:
                answers.append(
                    [
                        target.forward(cache, Batch.of({slot: fed[slot]})).logits_of(slot).clone()
                        for slot in slots
                    ]
                )
        for expected, again, found in zip(*answers, strict=True):
            same = torch.equal(found, expected) if self.bit_exact else agree(found, expected, again)
            if not same:
                raise UnsupportedModel(
                    f"{family(self.model)} gives other logits when it continues from the hidden states of "
                    f"its layer {self.depth}: embeddings or logits are changed outside its layers, so it "
                    "cannot exit early; use another drafter"
                )


def _rest(row: Rows, count: int) -> Rows:
    """A feed without its first ``count`` rows, which are already processed."""
    return Rows(row.tokens[count:], row.tree[count:], row.tree[:count]) if count else row

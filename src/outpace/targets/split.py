"""A target in two parts: lower layers, which may draft ahead, and upper ones, which go on from there.

What the lower layers computed for a draft is what the verification needs of them: their keys and values are
in the cache already, and their hidden states go into the upper layers. No row goes through a layer twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.cache import KVCache, Slot
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.around import AroundTarget
from outpace.targets.base import Output, Rows, TargetModel, rows_of
from outpace.targets.causal import CausalTarget
from outpace.targets.checks import family
from outpace.targets.layers import stack_of
from outpace.targets.self_test import agree


@dataclass
class Held:
    """A chain behind a slot's committed rows that has been through the lower layers.

    Attributes:
        states: what came out of them, each [hidden size].
    """

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    def shared(self, row: Rows) -> int:
        """How many rows of a feed are the first ones of this chain."""
        if row.fed:
            return 0
        count = 0
        for token, own, parent in zip(row.tokens, self.tokens, row.tree, strict=False):
            if token != own or parent != count - 1:
                break
            count += 1
        return count


class SplitTarget(AroundTarget):
    """A decoder-only model, split below one of its layers; its logits are those of the whole.

    One engine uses it, for it remembers what its lower layers are ahead by.

    Args:
        target: the model; a plain stack of layers.
        depth: how many layers are the lower ones, from 1 to all but one.

    Raises:
        OutpaceError: not a depth of this model. UnsupportedModel: it is no plain stack of layers, or its
            parts do not say what the whole says.
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
        self.inner = target
        self.depth = depth
        self.model = target.model
        self.vocabulary = target.vocabulary
        self.context = target.context
        self.eos_token_ids = target.eos_token_ids
        self._lower = target.some_layers(range(depth), bare=True)
        self._upper = target.some_layers(range(depth, target.layers))
        self._held: dict[Slot, Held] = {}
        self._check()

    def some_layers(self, layers: Sequence[int]) -> TargetModel:
        return self.inner.some_layers(layers)

    def new_cache(self, slots: int = 1, length: int = 256) -> KVCache:
        return self.inner.new_cache(slots, length)

    # -- ahead of the verification -----------------------------------------------------------------------

    def advance(self, cache: KVCache, slots: Sequence[Slot], tokens: Sequence[int]) -> Tensor:
        """Run the lower layers over one more row for each of some slots, behind what they are ahead by.

        Returns:
            The hidden states after them, [n, hidden size].
        """
        first, rows = rows_of(slots, [Rows([token]) for token in tokens])
        with cache.provisional({slot: len(held.tokens) for slot, held in self._held.items()}):
            states = self._lower.forward(cache, rows, first).logits
            cache.keep([range(len(row.tokens)) for row in rows])
        assert states is not None
        found = states[[slot.index - first for slot in slots], 0]
        for slot, token, state in zip(slots, tokens, found, strict=True):
            held = self._held.setdefault(slot, Held())
            held.tokens.append(token)
            held.states.append(state)
        return found

    def forget(self, slots: Sequence[Slot]) -> None:
        """Be ahead nowhere in these slots."""
        for slot in slots:
            self._held.pop(slot, None)

    def read_out(self, states: Tensor) -> Tensor:
        """What the model's own norm and head make of hidden states [..., hidden size]: logits."""
        return self.head(stack_of(self.model).norm(states))

    # -- the forward -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        cache: KVCache,
        rows: Sequence[Rows],
        first: int = 0,
        logits_from: int | None = 0,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        if any(layer != self.depth for layer in hidden_layers):
            raise OutpaceError(
                f"a target that is split gives the hidden states of layer {self.depth} alone, not of "
                f"{list(hidden_layers)}; use another drafter beside it"
            )
        slots = [cache.slot(first + place) for place in range(len(rows))]
        held = [self._held.pop(slot, Held()) for slot in slots]
        counts = [own.shared(row) for own, row in zip(held, rows, strict=True)]
        rest = [_rest(row, count) for row, count in zip(rows, counts, strict=True)]
        late: Tensor | None = None
        if any(row.tokens for row in rest):
            with cache.provisional(dict(zip(slots, counts, strict=True))):
                late = self._lower.forward(cache, rest, first).logits
                cache.keep([range(len(row.tokens)) for row in rest])
        states = _join(rows, held, counts, late)
        output = self._upper.run(cache, rows, first, logits_from, states=states)
        return Output(output.logits, dict.fromkeys(hidden_layers, states))

    # -- construction ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _check(self) -> None:
        """Together the parts say what the whole says: of a prompt, and of a tree that begins with a draft."""
        ids = [1 + place % (self.vocabulary - 1) for place in range(12)]
        prompts, tree = [ids[:3], ids[3:5]], Rows(ids[5:9], (-1, 0, 1, 0))
        answers = []
        for target in (self.inner, self):
            cache = target.new_cache(slots=2, length=16)
            slots = [cache.allocate(), cache.allocate()]
            target.forward(cache, [Rows(prompt) for prompt in prompts], logits_from=None)
            cache.keep([range(len(prompt)) for prompt in prompts])
            if target is self:
                for token in tree.tokens[:2]:
                    self.advance(cache, slots[:1], [token])
            answers.append(target.forward(cache, [tree, Rows(ids[9:12])]).logits)
        expected, found = answers
        assert expected is not None and found is not None
        for place, width in enumerate((4, 3)):
            if not agree(self.inner.model.dtype, found[place, :width], expected[place, :width]):
                raise UnsupportedModel(
                    f"{family(self.model)} gives other logits when it goes on from the hidden states of its "
                    f"layer {self.depth}: something happens to embeddings or logits besides its layers, "
                    "so it cannot exit early; use another drafter"
                )


def _rest(row: Rows, count: int) -> Rows:
    """A feed without its first rows, which are there."""
    if not count:
        return row
    if count == len(row.tokens):
        return Rows(())
    return Rows(row.tokens[count:], row.tree[count:], row.tree[:count])


def _join(rows: Sequence[Rows], held: Sequence[Held], counts: Sequence[int], late: Tensor | None) -> Tensor:
    """Hidden states [B, width, size] of all rows: those of each feed that were held first, then the late."""
    if late is not None and not any(counts):
        return late
    width = max(len(row.tokens) for row in rows)
    some = late if late is not None else next(own.states[0] for own in held if own.states)
    states = some.new_zeros((len(rows), width, some.shape[-1]))
    for place, (row, own, count) in enumerate(zip(rows, held, counts, strict=True)):
        if count:
            states[place, :count] = torch.stack(own.states[:count])
        if late is not None:
            states[place, count : len(row.tokens)] = late[place, : len(row.tokens) - count]
    return states

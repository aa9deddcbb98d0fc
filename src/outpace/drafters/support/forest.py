"""Trees that grow on a device, all sequences together, and reach the host in one transfer per draft.

Grown on the host, each layer's tokens are read before the next forward is launched, and the device waits.
Here every layer has a fixed size, so that one graph replays the growth of a whole draft. The host then hangs
the tokens on its trees by the rules of ``growth``.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from outpace.cache import FixedRows
from outpace.drafters.support.draws import Children
from outpace.drafters.support.growth import G, advance, confident, hang
from outpace.drafters.support.plans import GrowthNumbers, GrowthPlan, groups, pack, unpack
from outpace.draws.many_rows import has_kernels
from outpace.draws.warped import keys_on_device, noisy, warped
from outpace.targets.gpu.graphs import Made
from outpace.targets.inputs.device_rows import Trees
from outpace.transfer import gather, scatter, upload, upload_into


class Forest:
    """The trees of a batch of n places, while they grow.

    Args:
        ids: the token of each logit; None if it is the logit's place.

    Attributes:
        tokens: those of the front, [n, front].
        above: the parent of each node of the front, as a place in the front before, [n, front].
    """

    def __init__(self, plan: GrowthPlan, numbers: GrowthNumbers, ids: Tensor | None) -> None:
        self._plan, self._numbers, self._ids = plan, numbers, ids
        self.tokens = self.above = torch.empty(0)
        self._distributions: list[Tensor] = []
        self._found: list[Tensor] = []
        self._path = numbers.least.new_zeros(len(numbers.base), 1)
        self._real = numbers.used[:, None]
        self._every: list[Tensor] = []
        nodes, device = max(plan.rows, 1), numbers.base.device
        self._nodes = torch.arange(nodes, device=device)
        self._node_positions = numbers.base.new_zeros(len(numbers.base), nodes)
        self._sees = torch.zeros((len(numbers.base), 1, nodes), dtype=torch.bool, device=device)
        self._fed = 0

    @property
    def depth(self) -> int:
        """Number of layers that have grown."""
        return len(self._found) // 2

    @property
    def ended(self) -> bool:
        return self.depth == len(self._plan.layers)

    def grow(self, rows: Tensor) -> None:
        """Add a layer.

        Args:
            rows: logits after the nodes of the front, [n, front, drafted ids].
        """
        layer, rows = self._plan.layers[self.depth], rows.to(self._path.device)  # the head may be elsewhere
        places, weights = self._candidates(rows, layer.count)
        tokens = (
            places if self._ids is None else torch.where(places < 0, places, self._ids[places.clamp(min=0)])
        )
        self._found += [tokens.double().flatten(1), weights.flatten(1)]
        if self.ended:
            return
        if (parents := self._plan.layers[self.depth].parents) is None:
            chosen = self._most_confident(tokens.flatten(1), weights)
        else:
            chosen = _indices(parents, rows.device).expand(len(rows), -1)
        self.tokens = tokens.flatten(1).gather(1, chosen).clamp(min=0)
        self.above = chosen // layer.count

    def _candidates(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Places of the candidates in the rows, -1 for none, and their weights, each [n, front, count]."""
        plan, front = self._plan, rows.shape[1]
        flat = rows.flatten(0, 1)
        if count == 1 and not plan.weigh and plan.kind != "own":
            places = self._single(flat, front).view(-1, front, 1)
            return places, torch.zeros_like(places, dtype=torch.float64)
        values = flat.float() if flat.dtype.itemsize < 4 else flat
        if plan.kind != "best":
            values = warped(flat, self._numbers.warps.spread(front), plan.cut)
        scores, draws = values, plan.kind in ("shared", "own")
        if draws:
            scores, values = scores.double(), noisy(scores, self._keys(front), self._ids)
        best, places = values.topk(min(count, values.shape[-1]), dim=-1)
        weights = (best.double() - values.logsumexp(dim=-1, keepdim=True).double()).clamp(max=0)
        drawn = best > -torch.inf
        if draws:  # a chance may round to 0
            drawn = (scores.gather(1, places) - scores.logsumexp(dim=-1, keepdim=True)).exp() > 0
        if plan.kind == "own":
            self._distributions.append(scores.softmax(dim=-1))
        weights = torch.where(drawn, weights if plan.weigh else 0.0, -torch.inf)
        places, short = torch.where(drawn, places, -1), count - places.shape[1]
        places, weights = pad(places, (0, short), value=-1), pad(weights, (0, short), value=-torch.inf)
        return places.unflatten(0, (-1, front)), weights.unflatten(0, (-1, front))

    def _keys(self, front: int) -> Tensor:
        return self._numbers.keys[:, self.depth, None].expand(-1, front).reshape(-1)

    def _single(self, rows: Tensor, front: int) -> Tensor:
        """The only candidate from each row of logits, [n x front, drafted ids]; -1 for none."""
        if self._plan.kind in ("best", "warped"):
            return rows.argmax(dim=-1)
        warps = self._numbers.warps.spread(front)
        if self._plan.fused and has_kernels(rows.device):
            from outpace.draws.draw_kernel import draw

            keys = keys_on_device(self._keys(front), warps)
            return draw(rows.float(), keys, self._ids, sure=False, cut=self._plan.cut).clamp(min=-1)
        values = noisy(warped(rows, warps, self._plan.cut), self._keys(front), self._ids)
        return torch.where(values.amax(dim=-1) > -torch.inf, values.argmax(dim=-1), -1)

    def _most_confident(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """The candidates that are the next front, [n, front], by the rules of ``Confident.front``."""
        plan, numbers = self._plan, self._numbers
        before = self._path if plan.by_path else torch.zeros_like(self._path)
        grown = self._real & (before + weights[..., 0] >= plan.floor)
        layer = (self._path[..., None] + weights).masked_fill(~grown[..., None], -torch.inf).flatten(1)
        self._every.append(layer)
        least, every, most = numbers.least[:, None], torch.cat(self._every, dim=1), plan.most or 0
        if every.shape[1] >= most:
            least = torch.maximum(least, every.topk(most, dim=1).values[:, -1:])
        ends = (tokens[..., None] == numbers.stops[:, None]).any(dim=-1)
        ranked = layer.masked_fill(ends | (layer <= least), -torch.inf)
        size = plan.layers[self.depth].front
        best, chosen = ranked.sort(dim=1, descending=True, stable=True)
        chosen = torch.where(best > -torch.inf, chosen, layer.shape[1])[:, :size].sort(dim=1).values
        self._real = chosen < layer.shape[1]
        chosen = chosen.clamp(max=layer.shape[1] - 1)
        self._path = layer.gather(1, chosen)
        return chosen

    def rows(self, scratch: int) -> tuple[Tensor, Trees]:
        """The rows of the front after those of the text: where they are written, and what they attend to.

        Called once for each front that is fed, from the first on.

        Args:
            scratch: the row that places without a sequence write.

        Returns:
            Rows of the cache, [n, front], and the trees.
        """
        base, front = self._numbers.base[:, None], self.tokens.shape[1]
        own = self._nodes[self._fed : self._fed + front]
        above = self.above[..., None].expand(-1, -1, len(self._nodes))
        self._sees = self._sees.gather(1, above) | (self._nodes == own[:, None])
        positions = (base - 1 + self.depth).expand(-1, front)
        fed_now = (self._nodes >= self._fed) & (self._nodes < self._fed + front)
        self._node_positions = torch.where(fed_now, positions[:, :1], self._node_positions)
        self._fed += front
        real = self._numbers.used[:, None].expand(-1, front)
        trees = Trees(base, real, self._sees, positions, self._node_positions)
        return torch.where(real, base + own, scratch), trees

    @property
    def made(self) -> Made:
        """All candidates and their weights, float64 [n, numbers], and the distributions of layers."""
        return Made(torch.cat(self._found, dim=1), dict(enumerate(self._distributions)))


@lru_cache(maxsize=256)
def _indices(parents: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return upload(list(parents), device)


class GrowthInputs:
    """Inputs of the growth of a batch's trees, at fixed addresses.

    Args:
        numbers: as ``pack`` returns.
        like: what a place's growth begins with besides them, [n, ...].

    Attributes:
        numbers: those of ``pack``, on the device.
        given: what the growth begins with, [size, ...].
        rows: the rows of a cache that it writes; None for none.
    """

    def __init__(self, numbers: NDArray[np.int64], like: Tensor, rows: FixedRows | None = None) -> None:
        self.numbers = torch.zeros(numbers.shape, dtype=torch.int64, device=like.device)
        self.given = like.new_zeros(len(numbers), *like.shape[1:])
        self.rows = rows

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.given.nbytes

    def fill(self, numbers: NDArray[np.int64], places: Seq[int], given: Tensor) -> None:
        """Write a batch's numbers, and what is given for its places."""
        upload_into(self.numbers, numbers)
        scatter(self.given, places, given)


class Grown(NamedTuple):
    """What grew for the n sequences of a plan.

    Attributes:
        found: a row of ``Forest.made`` each, [n, numbers].
        distributions: that of each layer, [n, drafted ids], if there are any.
    """

    found: Tensor
    distributions: Seq[Tensor]

    @classmethod
    def of(cls, made: Made, places: Seq[int]) -> Grown:
        """Copies of the places' parts of what a forward made."""
        found, *distributions = (
            gather(each, places).clone() for each in (made.logits, *made.hidden.values())
        )
        return cls(found, distributions)

    @classmethod
    def joined(cls, parts: Seq[Grown], order: Seq[int]) -> Grown:
        """What several forwards made, of which row ``order[i]`` is that of sequence i."""
        if len(parts) == 1:
            return parts[0]
        layers = zip(*(part.distributions for part in parts), strict=True)
        found = torch.cat([part.found for part in parts])
        return cls(gather(found, order), [gather(torch.cat(each), order) for each in layers])


def grow_on_device(
    states: Seq[G], run: Callable[[GrowthPlan, list[G]], Grown | None], graphs: bool
) -> list[G]:
    """Grow trees whose tokens stay on the device until all are drawn; one transfer then brings them.

    Args:
        run: grows the trees of sequences that share a plan; None leaves them to the host.
        graphs: whether it captures graphs.

    Returns:
        The sequences whose trees the host must grow.
    """
    left, grown = list[G](), []
    for plan, members in groups(states, graphs):
        each = None if plan is None else run(plan, members)
        if plan is None or each is None:
            left += members
        else:
            grown.append((plan, members, each))
    if grown:
        found = iter(torch.cat([each.found.flatten() for *_, each in grown]).tolist())
        for plan, members, each in grown:
            for place, state in enumerate(members):
                numbers = list(islice(found, each.found.shape[1]))
                _hang_tree(plan, state, numbers, [own[place] for own in each.distributions])
    return left


def grow_paths(
    plan: GrowthPlan, numbers: GrowthNumbers, ids: Tensor | None, rows: Callable[[Tensor, Tensor], Tensor]
) -> Made:
    """Grow trees by the paths to their nodes, without any data from the host.

    Args:
        ids: as of ``Forest``.
        rows: returns the logits [n, drafted ids] after n paths, from whose each is, [n], and from their
            tokens, the root first, [n, 1 + depth].
    """
    forest, paths = Forest(plan, numbers, ids), numbers.roots[:, None, None]
    every = torch.arange(len(paths), device=paths.device)
    while True:
        count, front, depth = paths.shape
        owners = every[:, None].expand(-1, front).flatten()
        forest.grow(rows(owners, paths.flatten(0, 1)).unflatten(0, (count, front)))
        if forest.ended:
            return forest.made
        above = forest.above[..., None].expand(-1, -1, depth)
        paths = torch.cat([paths.gather(1, above), forest.tokens[..., None]], dim=2)


def grow_from(
    plan: GrowthPlan,
    members: Seq[Any],
    ids: Tensor | None,
    device: torch.device,
    rows: Callable[[Tensor, Tensor], Tensor],
) -> Grown:
    """Grow trees on a device outside of graphs; ``ids`` and ``rows`` as of ``grow_paths``."""
    places = range(len(members))
    numbers = unpack(plan, upload(pack(plan, members, places, [0] * len(members), len(members)), device))
    return Grown.of(grow_paths(plan, numbers, ids, rows), places)


def _hang_tree(plan: GrowthPlan, state: Any, found: Seq[float], distributions: Seq[Tensor]) -> None:
    tree, vocabulary, start = state.tree, state.shared.vocabulary, 0
    slots = {-1: 0}  # node of the front -> its place in the device's front
    for depth, layer in enumerate(plan.layers):
        size = layer.front * layer.count
        tokens, weights = found[start : start + size], found[start + size : start + 2 * size]
        start += 2 * size
        candidates: dict[int, int] = {}  # node -> the candidate that it is
        for node in tree.front:
            first = slots[node] * layer.count
            every = range(first, first + tree.shape.count(tree, node))
            kept = every[: next((place for place, one in enumerate(every) if tokens[one] < 0), len(every))]
            own = [weights[c] for c in kept]
            p = vocabulary.whole(distributions[depth]) if distributions and kept else None
            made = Children([int(tokens[c]) for c in kept], own, own[0] if own else 0.0, p)
            if confident(state, node, made):
                candidates.update(zip(hang(tree, node, made), kept, strict=True))
        advance(state, list(candidates))
        if not tree.front:
            return
        parents = plan.layers[depth + 1].parents
        slots = {
            node: place if parents is None or len(parents) == 1 else parents.index(candidates[node])
            for place, node in enumerate(tree.front)
        }

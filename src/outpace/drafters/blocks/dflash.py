"""DFlash (Chen, Liang, Liu 2026): a small block-diffusion drafter conditioned on the target's hidden states.

A block begins with the last committed token, and all other places are masked. One forward of a few layers
with bidirectional attention inside the block fills them. The text enters through the target: its states at
several layers, fused, provide keys and values to every layer of the drafter.

Its kin are read from their published files: DSpark, whose Markov head makes a place depend on the token drawn
before it; DFlash 2, which has convolutions over the block and chooses among the best tokens of each place by
pairs; JetSpec, whose block is causal. DSpark's confidence head is not read, since the governor decides how
much is drafted.

Differences from the paper: the mask is a separate embedding, since most vocabularies have no mask token;
tokens are drawn with the target's own noise by default; the objective is an option of training. By default it
is smaller: two layers that read three of the target's and fill blocks of 8, where the paper has five layers
that read five of the target's, evenly spread, and blocks of 16. ``decay`` is the paper's for 8.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from outpace.cache import FixedRows
from outpace.drafters.blocks.dflash_module import DFlashModule
from outpace.drafters.support.blocks import (
    BlockState,
    ReadingBlockDrafter,
    run_layers,
    through,
)
from outpace.drafters.support.forest import Grown, GrowthInputs, grow_paths
from outpace.drafters.support.layer_cache import Forward, LayerFeed
from outpace.drafters.support.plans import GrowthPlan, pack, unpack
from outpace.targets.gpu.fixed import FixedInputs, width_of
from outpace.targets.gpu.graphs import Made
from outpace.targets.inputs.device_rows import read_numbers
from outpace.targets.inputs.forward import rows_of
from outpace.targets.rows import HiddenStates, Rows
from outpace.transfer import upload

_CHUNK = 512  # places of a text in one forward


@dataclass(frozen=True)
class DFlash(ReadingBlockDrafter):
    """Block-diffusion drafter: DFlash, DFlash 2, DSpark and JetSpec.

    Attributes:
        path: a folder that ``outpace train dflash`` wrote, a published drafter of these kinds (by z-lab,
            DeepSeek, SpecForge or JetSpec, Muse's assistant, or in the layout of speculators) by folder or
            hub name, or the module itself.
    """

    kind: ClassVar[type[Any]] = DFlashModule
    when: ClassVar[str] = "with a block-diffusion drafter of your model, published or trained"
    needs: ClassVar[str] = "its folder"
    paper: ClassVar[str] = (
        "Chen, Liang, Liu 2026, DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036); "
        "DSpark, its semi-autoregressive form (arXiv 2607.05147); JetSpec, its causal form (arXiv "
        "2606.18394); trees: Ringel, Romano 2026, DDTree (arXiv 2604.12989)"
    )

    def fill(self, active: Seq[BlockState]) -> Tensor:
        _feed_text([state for state in active if state.waiting])
        return _fill(active)

    def grown(self, plan: GrowthPlan, members: Seq[BlockState]) -> Grown:
        _feed_text([state for state in members if state.waiting])
        return _run_growth(plan, members)


def _feed_text(behind: Seq[BlockState]) -> None:
    """Add keys and values of all waiting places to the cache, from the target's states."""
    texts = [_waited(state) for state in behind]
    for start in range(0, max((len(text) for text in texts), default=0), _CHUNK):
        late = [place for place, text in enumerate(texts) if len(text) > start]
        _feed_part(
            [behind[place] for place in late], [texts[place][start : start + _CHUNK] for place in late]
        )


def _waited(state: BlockState) -> Tensor:
    """Take the joined states of the waiting places, [n, layers x size]; none wait afterwards."""
    parts = [state.shared.module.joined(hidden) for hidden in state.waiting]
    state.waiting = []
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _feed_part(states: Seq[BlockState], texts: Seq[Tensor]) -> None:
    module, cache = states[0].shared.module, states[0].shared.cache
    if _feed_fixed(states, texts):
        return
    fused = [module.fuse(text) for text in texts]
    forward = cache.begin(
        [LayerFeed.text(state.slot, state.rows, len(rows)) for state, rows in zip(states, fused, strict=True)]
    )
    text = forward.pad(fused)
    angles = module.rotary(forward.positions, text)
    for place, layer in enumerate(module.layers):
        forward.store(place)(*layer.self_attn.keys(text, angles))
    forward.keep([len(rows) for rows in fused])
    for state, rows in zip(states, fused, strict=True):
        state.rows += len(rows)


def _feed_fixed(states: Seq[BlockState], texts: Seq[Tensor]) -> bool:
    """``_feed_part`` by a forward of fixed shapes; False if there are none, or that does not pay."""
    cache, widths = states[0].shared.cache, [len(text) for text in texts]
    if cache.shapes is None or not width_of(len(states), max(widths)):
        return False
    slots, like = [state.slot for state in states], texts[0]
    with cache.fixed(dict(zip(slots, widths, strict=True)), kept=True) as window:
        fed = {slot: Rows([0] * width) for slot, width in zip(slots, widths, strict=True)}
        cache.shapes.run(
            partial(_read, states[0].shared.module),
            window,
            rows_of(window, fed),
            HiddenStates(like.shape[1], like.dtype, like.device),
            (),
            dict(zip(slots, texts, strict=True)),
        )
    for state, width in zip(states, widths, strict=True):
        state.rows += width
    return True


def _read(module: DFlashModule, inputs: FixedInputs, layers: tuple[int, ...]) -> Made:
    """Write keys and values of a text's rows, whose joined states are in the inputs."""
    at, columns = read_numbers(inputs.numbers, inputs.width), inputs.rows
    assert inputs.states is not None
    text, rows = module.fuse(inputs.states), columns.at(torch.where(at.trees.real, at.rows, columns.scratch))
    angles = module.rotary(at.trees.positions, text)
    for place, layer in enumerate(module.layers):
        attention: Any = layer.self_attn
        rows.append(place, *attention.keys(text, angles))
    return Made(inputs.states, {})


def _run_growth(plan: GrowthPlan, members: Seq[BlockState]) -> Grown:
    """Fill the blocks of sequences that share a plan and draw from them, by a forward of fixed shapes."""
    shared = members[0].shared
    module, cache = shared.module, shared.cache
    assert cache.shapes is not None
    none = module.mask.new_zeros(len(members), 0)
    with cache.fixed({state.slot: module.width for state in members}, kept=False) as window:
        places = [window.slots.index(state.slot) for state in members]
        numbers = pack(plan, members, places, [state.rows for state in members], window.stop)
        made = cache.shapes.replay(
            window.lane.memory,
            (plan, window.stop, window.columns, module.drafted.revision(module.target)),
            lambda: GrowthInputs(numbers, none, FixedRows(window, none.device)),
            lambda inputs: inputs.fill(numbers, places, none),
            lambda inputs: _growth(module, plan, inputs),
        )
    return Grown.of(made, places)


def _growth(module: DFlashModule, plan: GrowthPlan, inputs: GrowthInputs) -> Made:
    """Fill blocks and draw from them with the data in the inputs, without any data from the host."""
    numbers, columns = unpack(plan, inputs.numbers), inputs.rows
    assert columns is not None
    base, width, device = numbers.base[:, None], module.width, inputs.numbers.device
    positions = base + torch.arange(width, device=device)
    sees = torch.arange(columns.columns, device=device) < base + width
    forward = Forward(
        columns.at(torch.where(numbers.used[:, None], positions, columns.scratch)),
        positions,
        sees[:, None, None].expand(-1, 1, width, -1),
        numbers.used * width,
    )
    states = through(module, forward, module.masked(numbers.roots))[:, module.first :]
    return grow_paths(plan, numbers, None, partial(module.rows, states, module.logits(states)))


def _fill(active: Seq[BlockState]) -> Tensor:
    """Outputs of the layers at the places of each block, [n, tokens, hidden size].

    The rows do not stay in the cache. Row 0 of a block is the root, at position ``state.rows``; the others
    are masked.
    """
    module = active[0].shared.module
    width = module.width
    sees = np.ones((width, width), dtype=np.bool_)
    feeds = [LayerFeed(state.slot, range(state.rows, state.rows + width), sees) for state in active]
    roots = upload([state.sequence.tokens[-1] for state in active], module.mask.device)
    rows = run_layers(active, feeds, list(module.masked(roots)), keep=[0] * len(active))
    return torch.stack(rows)[:, module.first :]

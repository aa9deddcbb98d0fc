"""DFlash (Chen, Liang, Liu 2026): a small block-diffusion drafter conditioned on the target's hidden states.

A block begins with the last committed token, and all other places are masked. One forward of a few layers
with bidirectional attention inside the block fills them. The text enters through the target: its states at
several layers, fused, provide keys and values to every layer of the drafter.

Differences from the paper: the mask is a separate embedding, since most vocabularies have no mask token;
tokens are drawn with the target's own noise by default; the objective is an option of training. By default it
is smaller: two layers that read three of the target's and fill blocks of 8, where the paper has five layers
that read five of the target's, evenly spread, and blocks of 16. ``decay`` is the paper's for 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from outpace.cache import FixedRows
from outpace.core import OutpaceError
from outpace.drafters.blocks.blocks import (
    BlockConfig,
    BlockDrafter,
    BlockModule,
    BlockShared,
    BlockState,
    run_layers,
    through,
)
from outpace.drafters.support.forest import Forest, Grown, GrowthInputs
from outpace.drafters.support.layer_cache import Forward, LayerFeed
from outpace.drafters.support.plans import GrowthPlan, pack, unpack
from outpace.learned import published_dflash
from outpace.learned.hidden_layers import default_layers
from outpace.learned.learned import Fit, head_weights
from outpace.learned.published import find
from outpace.learned.vocabulary import DraftVocabulary
from outpace.sequence import Step
from outpace.spec import check_least
from outpace.targets.base import TargetModel
from outpace.targets.gpu.fixed import FixedInputs, width_of
from outpace.targets.gpu.graphs import Made
from outpace.targets.inputs.device_rows import read_numbers
from outpace.targets.inputs.forward import rows_of
from outpace.targets.rows import HiddenStates, Rows
from outpace.transfer import upload

_CHUNK = 512  # places of a text in one forward


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """A DFlash drafter's size, and how it is trained.

    Attributes:
        layers: the target's layers whose states it reads, numbered as in ``Output.hidden``, as in 2+14+25; by
            default a low, a middle and a high one.
        draft_vocabulary: number of the target's ids that are drafted, those most frequent in the training
            text; 0 is all.
    """

    method: ClassVar[str] = "dflash"

    layers: tuple[int, ...] = ()
    draft_vocabulary: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self.method, self, draft_vocabulary=0)


class DFlashModule(BlockModule):
    """DFlash's layers and the fusion of the target's states."""

    method: ClassVar[str] = "dflash"
    config_type: ClassVar[type[DFlashConfig]] = DFlashConfig
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        self.drafted = DraftVocabulary(self.method, config.draft_vocabulary, fit)
        size = config.hidden_size
        if size != fit.hidden_size:
            raise OutpaceError(
                "dflash: it uses the target's embeddings and head, so hidden_size must "
                f"be the target's, {fit.hidden_size}, not {size}; leave it out"
            )
        self.fc = nn.Linear(len(config.layers) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=config.eps)
        self.mask = nn.Parameter(torch.empty(1, size))
        self.add_layers(norms=True)

    @classmethod
    def new(cls, config: DFlashConfig, target: TargetModel) -> Self:
        layers = config.layers or default_layers(target)
        return super().new(replace(config.sized(target.hidden.size), layers=layers), target)

    @classmethod
    def load(cls, folder: str | Path, target: TargetModel) -> Self:
        """Load a folder that outpace wrote, or a published DFlash, which may be a name on the hub.

        See ``outpace.learned.published_dflash``.
        """
        place = find(folder, "dflash")
        described = published_dflash.read(place)
        if described is None:
            return super().load(place, target)
        fields = published_dflash.read_config(described, target.layers, target.vocabulary, place)
        tensors, copies = published_dflash.read_tensors(place)
        if fields["draft_vocabulary"] and "drafted.ids" not in tensors:
            raise OutpaceError(
                f"dflash: there is no tensor 'd2t' in {place}, which maps its {fields['draft_vocabulary']} "
                "drafted ids to the target's"
            )
        fit = Fit(fields.pop("vocabulary"), fields["hidden_size"], fields.pop("target"))
        mask, windows = fields.pop("mask_token"), fields.pop("windows")
        config = DFlashConfig(**fields).sized(fit.hidden_size)
        made = cls.sketched(config, fit, target, tensors, str(place), given=("mask",))
        if not 0 <= mask < target.vocabulary:
            raise OutpaceError(
                f"dflash: the mask_token_id of {place}, {mask}, is not a token of {target.name}; its target "
                "has a larger vocabulary"
            )
        _check_copies(copies, target, place, tensors.get("drafted.ids"))
        made.windows = windows if any(windows) else ()
        masked = _embedded(target, upload([mask], target.hidden.device))
        return made.drafting(target, {**tensors, "mask": masked}, str(place))

    def save(self, folder: str | Path) -> None:
        """See ``Learned``.

        Raises:
            OutpaceError: it has windows, which outpace's own format lacks.
        """
        if self.windows:
            raise OutpaceError("dflash: layers with a window are not saved; keep the published folder")
        super().save(folder)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.config.layers

    def joined(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The target's states at all layers that it reads, concatenated, [..., layers x size]."""
        return torch.cat([hidden[layer] for layer in self.config.layers], dim=-1)

    def fuse(self, states: Tensor) -> Tensor:
        """The drafter's input from the target's joined states, [..., hidden size]."""
        fused: Tensor = self.hidden_norm(self.fc(states.to(self.mask.dtype)))
        return fused

    def masked(self, roots: Tensor) -> Tensor:
        """Input rows [..., 1 + tokens, hidden size] of blocks that begin with the tokens ``roots`` [...]."""
        embedded = _embedded(self.target, roots).to(self.mask.dtype)[..., None, :]
        masks = self.mask.expand(*roots.shape, self.config.tokens, -1)
        return torch.cat([embedded, masks], dim=-2)

    def logits(self, states: Tensor) -> Tensor:
        return self.drafted.head(self.target)(self.norm(states))


def _embedded(target: TargetModel, tokens: Tensor) -> Tensor:
    """Embeddings of tokens, without the norm that Muse has after its table, which DFlash does not read."""
    table: Any = getattr(target.model, "get_input_embeddings", lambda: None)()
    if not hasattr(table, "embed_norm"):
        return target.embed(tokens)
    return functional.embedding(tokens, table.weight.detach())


@torch.no_grad()
def _check_copies(copies: Mapping[str, Tensor], target: TargetModel, place: Path, ids: Tensor | None) -> None:
    """Check that a file's embeddings and head are the target's, which is used in their place.

    Args:
        ids: those that are drafted, of which alone the file has the head; None for all.

    Raises:
        OutpaceError: they differ.
    """
    own = {"embed_tokens.weight": target.embed(torch.arange(target.vocabulary, device=target.hidden.device))}
    head = head_weights(target)
    if head is not None:
        own["lm_head.weight"] = head[0] if ids is None else head[0][ids.to(head[0].device)]
    for name, tensor in own.items():
        copy = copies.get(name)
        if copy is not None and not (
            copy.shape == tensor.shape
            and torch.allclose(copy.to(tensor), tensor.to(copy.dtype).to(tensor), rtol=1e-2, atol=1e-3)
        ):
            raise OutpaceError(
                f"dflash: {name!r} in {place} is not that of {target.name}; give the target that the drafter "
                "was made for"
            )


@dataclass(frozen=True)
class DFlash(BlockDrafter):
    """Block-diffusion drafter.

    Attributes:
        path: a folder that ``outpace train dflash`` wrote, a published DFlash (z-lab/dflash, Muse's
            assistant, or in the layout of speculators) by folder or hub name, or the module itself.
    """

    kind: ClassVar[type[BlockModule]] = DFlashModule
    when: ClassVar[str] = "with a block-diffusion drafter of your model, published or trained"
    needs: ClassVar[str] = "its folder"
    paper: ClassVar[str] = (
        "Chen, Liang, Liu 2026, DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036)"
    )

    def hidden_layers(self, shared: BlockShared) -> tuple[int, ...]:
        layers: tuple[int, ...] = shared.module.hidden_layers
        return layers

    def read(self, states: Seq[BlockState], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for state, own in zip(states, hidden, strict=True):
            state.waiting.append(own)

    def observe(self, states: Seq[BlockState], steps: Seq[Step]) -> None:
        self.read(states, [step.committed for step in steps])

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
    with cache.fixed({state.slot: 1 + module.config.tokens for state in members}, kept=False) as window:
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
    base, width, device = numbers.base[:, None], 1 + module.config.tokens, inputs.numbers.device
    positions = base + torch.arange(width, device=device)
    sees = torch.arange(columns.columns, device=device) < base + width
    forward = Forward(
        columns.at(torch.where(numbers.used[:, None], positions, columns.scratch)),
        positions,
        sees[:, None, None].expand(-1, 1, width, -1),
        numbers.used * width,
    )
    states = through(module, forward, module.masked(numbers.roots))
    logits = module.drafted.spread(module.logits(states[:, 1:]))
    forest = Forest(plan, numbers, None)
    while not forest.ended:
        forest.grow(logits[:, forest.depth, None])
    return forest.made


def _fill(active: Seq[BlockState]) -> Tensor:
    """Logits [n, tokens, vocabulary] of the masked places, whose rows do not stay in the cache.

    Row 0 of a block is the root, at position ``state.rows``; rows 1 to ``tokens`` are masked.
    """
    module = active[0].shared.module
    width = 1 + module.config.tokens
    sees = np.ones((width, width), dtype=np.bool_)
    feeds = [LayerFeed(state.slot, range(state.rows, state.rows + width), sees) for state in active]
    roots = upload([state.sequence.tokens[-1] for state in active], module.mask.device)
    rows = run_layers(active, feeds, list(module.masked(roots)), keep=[0] * len(active))
    logits: Tensor = module.drafted.spread(module.logits(torch.stack(rows)[:, 1:]))
    return logits

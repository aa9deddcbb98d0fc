"""DFlash's module: a few layers that fill the masked places of a block from the target's states.

The layers are Qwen3's. Published drafters of the same kin have further parts: see ``ExtendedConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.drafters.blocks.dflash_parts import CandidateSelector, ConvolvedLayer, MarkovHead
from outpace.drafters.support.blocks import BlockConfig, BlockModule
from outpace.learned import published_dflash
from outpace.learned.hidden_layers import default_layers
from outpace.learned.layers import Layer
from outpace.learned.learned import Fit, head_weights
from outpace.learned.published import find
from outpace.learned.vocabulary import DraftVocabulary
from outpace.spec import check_least
from outpace.targets.base import TargetModel
from outpace.transfer import upload


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


@dataclass(frozen=True, kw_only=True)
class ExtendedConfig(DFlashConfig):
    """What published drafters have beside DFlash's parts. Nothing of it is trained here, or saved.

    Attributes:
        windows, causal: as of ``BlockModule``; JetSpec's blocks are causal.
        anchored: whether a block's first place is predicted at the root's own row, as DSpark's is, and not at
            the first mask's.
        markov_rank: rank of DSpark's Markov head; 0 for none.
        markov_kind: what its bias depends on, see ``MarkovHead``.
        taps: rows that DFlash 2's convolutions read; 0 for no convolutions.
        group: size of the groups that share the coefficients of a convolution.
        selector_rank: rank of DFlash 2's selector; 0 for none.
        candidates: tokens that it chooses among.
        input_scale: factor on the embeddings.
        multiplier: factor on the logits, before the soft cap.
        cap: soft cap of the logits; 0 for none.
    """

    windows: tuple[int, ...] = ()
    causal: tuple[bool, ...] = ()
    anchored: bool = False
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    taps: int = 0
    group: int = 1
    selector_rank: int = 0
    candidates: int = 1
    input_scale: float = 1.0
    multiplier: float = 1.0
    cap: float = 0.0


class DFlashModule(BlockModule):
    """DFlash's layers and the fusion of the target's states.

    Class attributes:
        extends: whether it computes what an ``ExtendedConfig`` describes.

    Attributes:
        first: the row of a block that predicts its first place.
    """

    method: ClassVar[str] = "dflash"
    config_type: ClassVar[type[DFlashConfig]] = DFlashConfig
    extends: ClassVar[bool] = True
    config: DFlashConfig
    markov_head: MarkovHead | None
    candidate_selector: CandidateSelector | None

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
        self._add_further(config if isinstance(config, ExtendedConfig) else ExtendedConfig())
        self.add_layers(norms=True, kind=ConvolvedLayer if self._further.taps else Layer)

    def _add_further(self, further: ExtendedConfig) -> None:
        """Add the further parts of a published drafter, if there are any."""
        config, vocabulary = self.config, self.fit.vocabulary
        drafted = config.draft_vocabulary or vocabulary
        self._further, self.first = further, int(not further.anchored)
        self.windows, self.causal = further.windows, further.causal
        self.markov_head = MarkovHead(config, vocabulary, drafted) if further.markov_rank else None
        self.candidate_selector = CandidateSelector(config, vocabulary) if further.selector_rank else None
        self.conditional = bool(further.markov_rank or further.selector_rank)
        if further.selector_rank and drafted < vocabulary:
            raise OutpaceError(
                "dflash: a drafter with a selector drafts the whole vocabulary; leave out draft_vocab_size"
            )

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
        mask, config = (
            fields.pop("mask_token"),
            cls._config_of(fields, described, place).sized(fit.hidden_size),
        )
        made = cls.sketched(config, fit, target, tensors, str(place), given=("mask",))
        if not 0 <= mask < target.vocabulary:
            raise OutpaceError(
                f"dflash: the mask_token_id of {place}, {mask}, is not a token of {target.name}; its target "
                "has a larger vocabulary"
            )
        _check_copies(copies, target, place, tensors.get("drafted.ids"))
        masked = _embedded(target, upload([mask], target.hidden.device))
        return made.drafting(target, {**tensors, "mask": masked}, str(place))

    @classmethod
    def _config_of(cls, fields: Mapping[str, Any], described: Mapping[str, Any], place: Path) -> DFlashConfig:
        further = published_dflash.read_extension(described, fields["depth"], place)
        if further and not cls.extends:
            raise OutpaceError(
                f"dflash: the drafter in {place} has parts that are not trained: {', '.join(further)}; train "
                "one without them"
            )
        return ExtendedConfig(**fields, **further) if further else DFlashConfig(**fields)

    def save(self, folder: str | Path) -> None:
        """See ``Learned``.

        Raises:
            OutpaceError: it has parts that outpace's own format lacks.
        """
        if isinstance(self.config, ExtendedConfig):
            raise OutpaceError("dflash: a published drafter with further parts is not saved; keep its folder")
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
        """Input rows [..., width, hidden size] of blocks that begin with the tokens ``roots`` [...]."""
        embedded = _embedded(self.target, roots).to(self.mask.dtype)[..., None, :]
        masks = self.mask.expand(*roots.shape, self.width - 1, -1)
        rows, scale = torch.cat([embedded, masks], dim=-2), self._further.input_scale
        return rows if scale == 1 else rows * scale

    @property
    def width(self) -> int:
        """Rows of a block."""
        return self.first + self.config.tokens

    def logits(self, states: Tensor) -> Tensor:
        factor, cap = self._further.multiplier, self._further.cap
        logits = self.drafted.head(self.target)(self.norm(states))
        if factor != 1:
            logits = logits * factor
        return (logits / cap).tanh() * cap if cap else logits

    def after(self, logits: Tensor, states: Tensor, paths: Tensor) -> Tensor:
        if self.markov_head is not None:
            biased: Tensor = logits + self.markov_head(self.norm(states), paths).to(logits)
            return biased
        assert self.candidate_selector is not None
        chosen: Tensor = self.candidate_selector(logits, self.norm(states[:, -1]), paths[:, -1])
        return chosen


def _embedded(target: TargetModel, tokens: Tensor) -> Tensor:
    """Embeddings of tokens, without the norm that Muse has after its table, which DFlash does not read."""
    table: Any = getattr(target.model, "get_input_embeddings", lambda: None)()
    if not hasattr(table, "embed_norm"):
        return target.embed(tokens)
    return functional.embedding(tokens, table.weight.detach())


@torch.no_grad()
def _check_copies(copies: Mapping[str, Tensor], target: TargetModel, place: Path, ids: Tensor | None) -> None:
    """Check that a file's embeddings and head are the target's, which is used in their place."""
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

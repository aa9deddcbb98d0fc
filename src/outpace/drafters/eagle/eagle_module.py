"""EAGLE's module: a decoder layer that continues the target's hidden states, its *features*.

Li et al. 2024 (EAGLE, arXiv 2401.15077, section 4) and Li et al. 2025 (EAGLE-3, arXiv 2503.01840, section 3).
Row r reads the feature of place r and the token of place r + 1, and predicts the token of place r + 2; its
output replaces the feature of place r + 1, which the target has not computed yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.learned import published
from outpace.learned.hidden_layers import default_layers, low_middle_high
from outpace.learned.layers import Attention, FeedForward, Layer, LayerConfig, Rotary, Store, initialise
from outpace.learned.learned import Fit, Learned, PartialHead
from outpace.spec import check_least
from outpace.targets.base import TargetModel

# Layer of the drafter -> the function that stores its keys and values.
Stores = Callable[[int], Store]

_TOKENS = 5  # tokens of a draft, if neither the user nor a file specifies the number


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """An EAGLE drafter's layers and sizes, and how it is trained.

    Attributes:
        version: 1 predicts the input of the target's head; 3 fuses several layers and predicts only tokens.
        layers: the target's layers whose states EAGLE-3 reads, numbered as in ``Output.hidden``; by default a
            low, a middle and a high one. EAGLE-1 reads the input of the head.
        draft_vocabulary: number of the target's ids that are drafted, those most frequent in the training
            text; 0 is all.
        depth: number of decoder layers.
        norm_before_residual: whether the residual branch starts from the normalised feature.
        norm_before_fc: whether EAGLE-3 normalises the target's concatenated states before fusing them.
        fc_norm: whether it normalises each of them separately instead.
        norm_output: whether it continues from its normalised output, as EAGLE-3.1 does.
        own_head: whether EAGLE-3 has its own head; otherwise, as in EAGLE-1, it uses the target's.
        own_embeddings: whether it has its own embeddings; otherwise it uses the target's.
        steps: number of depths that training unrolls; by default 5, for EAGLE-1 1. See ``tokens``.
        decay: weight of each depth's loss, relative to the depth before.
        classification: weight of EAGLE-1's loss on tokens, relative to its regression on features.
        linear_start: start EAGLE-1 from the linear map of feature and token that predicts the next feature
            best (least squares over the texts), with a layer that changes nothing.
    """

    version: int = 3
    layers: tuple[int, ...] = ()
    draft_vocabulary: int = 0
    depth: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_head: bool = True
    own_embeddings: bool = False
    steps: int = 0
    decay: float = 0.8
    classification: float = 0.1
    linear_start: bool = False

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise OutpaceError(
                f"eagle: version must be 1 or 3, not {self.version}; for EAGLE-2 use either with expand"
            )
        check_least("eagle", self, steps=0, draft_vocabulary=0, depth=1)
        if self.norm_before_fc and self.fc_norm:
            raise OutpaceError("eagle: norm_before_fc and fc_norm exclude each other; give one")
        if self.linear_start and self.version != 1:
            raise OutpaceError("eagle: linear_start needs EAGLE-1; leave it out, or train with version=1")
        for name in published.NORMS:
            if self.version == 1 and getattr(self, name):
                raise OutpaceError(f"eagle: {name} needs EAGLE-3; leave it out, or train with version=3")

    @property
    def tokens(self) -> int:
        """Default length of drafts, and length at which held-out text is measured.

        It is the number of depths that training unrolls, but 5 for an EAGLE-1 trained on single rows.
        """
        return _TOKENS if self.version == 1 and self.steps == 1 else self.steps

    def made_for(self, target: TargetModel) -> EagleConfig:
        """This config with all defaults resolved for a target."""
        layers = (-1,) if self.version == 1 else self.layers or default_layers(target)
        return dataclasses.replace(
            self.sized(target.hidden.size),
            layers=layers,
            draft_vocabulary=self.draft_vocabulary or target.vocabulary,
            own_head=self.own_head and self.version == 3,
            steps=self.steps or (1 if self.version == 1 else _TOKENS),
        )


class FusedLayer(nn.Module):
    """EAGLE-3's decoder layer: attention reads the token's embedding and the feature, concatenated."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = Attention(config, 2 * size)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(size, eps=config.eps)
        self.hidden_norm = nn.RMSNorm(size, eps=config.eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, embedded: Tensor, features: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, store: Store
    ) -> Tensor:
        """Apply the layer to embeddings and features, [B, width, hidden size]; see ``Attention``."""
        normed = self.hidden_norm(features)
        before = normed if self.norm_before_residual else features
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        states = before + self.self_attn(both, angles, mask, store)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class EagleModule(Learned):
    """EAGLE's layers, with the fusion before and the norm and head after them."""

    method: ClassVar[str] = "eagle"
    config_type: ClassVar[type[EagleConfig]] = EagleConfig
    config: EagleConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        _check_sizes(config, fit)
        size, first = config.hidden_size, config.version == 1
        self.fc = nn.Linear((2 if first else len(config.layers)) * size, size, bias=first)
        entry = Layer(config, normed=False) if first else FusedLayer(config)
        self.layers = nn.ModuleList([entry, *(Layer(config) for _ in range(1, config.depth))])
        if not first:
            self.norm = nn.RMSNorm(size, eps=config.eps)
        # Named as in speculators' files.
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(len(config.layers) * size, eps=config.eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps=config.eps) for _ in config.layers)
        if config.own_head:
            self.lm_head = nn.Linear(size, config.draft_vocabulary, bias=False)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(fit.vocabulary, size)
        if config.draft_vocabulary < fit.vocabulary:
            # As published, offsets to the target's ids instead of the ids.
            self.register_buffer("d2t", torch.zeros(config.draft_vocabulary, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(fit.vocabulary) < config.draft_vocabulary)
        self._rotary = Rotary(config)
        self._partial: PartialHead | None = None
        initialise(self)

    @classmethod
    def new(cls, config: EagleConfig, target: TargetModel) -> Self:
        return super().new(config.made_for(target), target)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.config.layers

    @property
    def drafted(self) -> Tensor | None:
        """The target's id of each drafted id, [draft vocabulary]; None if all ids are drafted."""
        if self.config.draft_vocabulary == self.fit.vocabulary:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The features, [..., hidden size], from the target's states, layer -> [..., hidden size]."""
        dtype = next(self.parameters()).dtype
        states = [hidden[layer].to(dtype) for layer in self.config.layers]
        return states[0] if self.config.version == 1 else self.fused(states)

    def fused(self, states: list[Tensor]) -> Tensor:
        """EAGLE-3's features from the target's states at each layer that it reads, [..., hidden size]."""
        if self.config.fc_norm:
            states = [norm(rows) for norm, rows in zip(self.fc_norm, states, strict=True)]
        read = torch.cat(states, dim=-1)
        fused: Tensor = self.fc(self.input_norm(read) if self.config.norm_before_fc else read)
        return fused

    def advance(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, stores: Stores
    ) -> Tensor:
        """The rows' outputs, [B, width, hidden size]: predicted features one place later.

        Args:
            tokens: the token at the place after each row's feature, [B, width].
            features: the rows' features, [B, width, hidden size].
            positions: positions of the features, [B, width].
            mask: see ``Attention``, [B or 1, 1, width, columns].
        """
        embedded = self.embed_tokens(tokens) if self.config.own_embeddings else self.target.embed(tokens)
        embedded = embedded.to(features)
        angles = self._rotary(positions, features)
        first = self.layers[0]
        if self.config.version == 1:
            states = first(self.fc(torch.cat([embedded, features], dim=-1)), angles, mask, stores(0))
        else:
            states = first(embedded, features, angles, mask, stores(0))
        for place, layer in enumerate(self.layers[1:], 1):
            states = layer(states, angles, mask, stores(place))
        out: Tensor = self.norm(states) if self.config.norm_output else states
        return out

    def drafted_logits(self, states: Tensor) -> Tensor:
        """Logits [..., draft vocabulary] of the token after rows whose outputs are [..., hidden size]."""
        if self.config.version == 3 and not self.config.norm_output:
            states = self.norm(states)
        if self.config.own_head:
            rows: Tensor = self.lm_head(states)
            return rows
        return self.targets_head(states)

    @property
    def targets_head(self) -> PartialHead:
        """The target's head, over the ids that are drafted."""
        if self._partial is None:
            self._partial = PartialHead(self.target, self.drafted)
        return self._partial

    # -- on disk -----------------------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: str | Path, target: TargetModel) -> Self:
        """Load a folder that outpace wrote, or a published EAGLE, which may be a name on the hub.

        See ``outpace.learned.published``.
        """
        place = published.find(folder, cls.method)
        described = published.read(place)
        if described is None:
            return super().load(place, target)
        return cls._load_published(place, described, target)

    @classmethod
    def _load_published(cls, folder: str | Path, described: Mapping[str, Any], target: TargetModel) -> Self:
        layers = published.named_layers(described) or low_middle_high(target.layers)
        fields = published.read_config(described, layers, folder, cls.method)
        tensors = published.read_tensors(folder)
        fit = Fit(fields.pop("vocabulary"), fields["hidden_size"], published.target_of(described))
        embedded = tensors.get("embed_tokens.weight")
        if embedded is not None and _is_shared(embedded, target):
            del tensors["embed_tokens.weight"]
        config = EagleConfig(**fields, own_embeddings="embed_tokens.weight" in tensors)
        if config.version == 1:
            tensors.setdefault("fc.bias", torch.zeros(config.hidden_size))  # some have none
        whole = config.draft_vocabulary >= fit.vocabulary
        if whole and not tensors.get("d2t", torch.zeros(1)).any():
            tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        made = cls.sketched(config.sized(fit.hidden_size), fit, target, tensors, str(folder))
        return made.drafting(target, tensors, str(folder))

    def take(self, tensors: Mapping[str, Tensor], where: str) -> None:
        super().take(tensors, where)
        self._check_map(where)

    def _check_map(self, where: str) -> None:
        drafted = self.drafted
        if drafted is None:
            return
        size = self.fit.vocabulary
        if bool((drafted < 0).any()) or bool((drafted >= size).any()) or bool((drafted.diff() <= 0).any()):
            raise OutpaceError(
                f"{where}: tensor 'd2t' maps to ids from {int(drafted.min())} to {int(drafted.max())}; each "
                f"entry plus its index must be an id below {size}, and above the one before"
            )
        if self.t2d.nonzero().flatten().tolist() != drafted.tolist():
            raise OutpaceError(
                f"{where}: tensor 't2d' marks {int(self.t2d.sum())} ids as drafted, instead of the "
                f"{len(drafted)} that tensor 'd2t' maps to"
            )


def _check_sizes(config: EagleConfig, fit: Fit) -> None:
    """Check the sizes against the target's."""
    if config.hidden_size != fit.hidden_size:
        raise OutpaceError(
            "eagle: it reads the target's embeddings and continues its states, so hidden_size "
            f"must be the target's, {fit.hidden_size}, not {config.hidden_size}; leave it out"
        )
    if config.draft_vocabulary > fit.vocabulary:
        raise OutpaceError(
            f"eagle: draft_vocabulary must be at most the target's vocabulary, {fit.vocabulary}, not "
            f"{config.draft_vocabulary}; 0 drafts all of it"
        )


@torch.no_grad()
def _is_shared(embedded: Tensor, target: TargetModel) -> bool:
    """True if published embeddings are the target's own."""
    hidden = target.hidden
    if embedded.shape != (target.vocabulary, hidden.size):
        return False
    own = target.embed(torch.arange(target.vocabulary, device=hidden.device))
    return torch.equal(own.to(embedded.dtype), embedded.to(own.device))

"""Trainable draft model: a small language model, from scratch or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.drafters.support.pieces import disagreement
from outpace.learned.layers import LayerConfig
from outpace.learned.learned import Fit
from outpace.learned.vocabulary import DraftVocabulary, drafted_ids
from outpace.spec import check_least
from outpace.targets import CausalTarget, Target, TargetModel
from outpace.targets.weights.pretrained import load_tokenizer, read_model
from outpace_lab.train.trained import (
    Losses,
    Objective,
    TrainedPart,
    TrainingBatch,
    accepted_of_chain,
    among,
    ids_of,
    learnable,
    learnt_logits,
    measure,
)


@dataclass(frozen=True)
class ChainConfig:
    """Options for measuring a draft model.

    Attributes:
        num_speculative_tokens: length of the chain that is measured on held-out text, as in ``DraftModel``.
    """

    num_speculative_tokens: int = 4

    def __post_init__(self) -> None:
        check_least("draft_model", self, num_speculative_tokens=1)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ChainConfig):
    """A draft model that starts from another model.

    Attributes:
        draft: folder or name of a transformers model, which determines the sizes.
    """

    draft: str


@dataclass(frozen=True, kw_only=True)
class DraftConfig(LayerConfig, ChainConfig):
    """A draft model from scratch, of the Llama architecture.

    Attributes:
        hidden_size: hidden size; 0 is half of the target's.
        context: maximum number of positions; 0 is the target's, or 2048 if that has no limit.
        depth: number of decoder layers.
        tied: whether head and embeddings share their weights.
        draft_vocabulary: number of the target's ids that are drafted, those most frequent in the training
            text; 0 is all. The config of the folder names them, as ``draft_vocabulary_ids``.
    """

    context: int = 0
    depth: int = 2
    tied: bool = True
    draft_vocabulary: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("draft_model", self, depth=1, draft_vocabulary=0)


class TrainedDraft(TrainedPart):
    """A language model that drafts for a target of the same vocabulary, stored in transformers' format.

    Args:
        model: a transformers model in float32.
    """

    method: ClassVar[str] = "draft_model"
    config_type: ClassVar[type[DraftConfig]] = DraftConfig
    checkpoint_type: ClassVar[type[ChainConfig]] = ChainConfig
    config: DraftConfig | CheckpointConfig

    def __init__(self, config: DraftConfig | CheckpointConfig, fit: Fit, model: Any) -> None:
        super().__init__(config, fit)
        self.model = model
        fits = getattr(model.config, "vocab_size", None) == fit.vocabulary  # otherwise ``check`` refuses it
        ids = drafted_ids(model) if fits else None
        size = config.draft_vocabulary if isinstance(config, DraftConfig) else 0 if ids is None else len(ids)
        self.drafted = DraftVocabulary(self.method, size, fit)
        if ids is not None:
            self.drafted.choose(ids)
        self._own: tuple[Any, CausalTarget] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_own": None}  # a copy makes its own: packed weights cannot be copied

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def context(self) -> int | None:
        return self.own.context

    @property
    def own(self) -> CausalTarget:
        """The model as a target."""
        self._write_ids()
        like = self.model.dtype, self.model.device
        # Rebuilt if the module was cast or moved.
        if self._own is None or self._own[0] != like:
            training = self.training
            made = Target(self.eval().model)
            assert isinstance(made, CausalTarget)
            self._own = like, made
            self.train(training)
        return self._own[1]

    @property
    def writer(self) -> TargetModel:
        if self.drafted.reduced:
            raise OutpaceError(
                "draft_model: this one learns to draft a part of its vocabulary, so it cannot write its own "
                "text to learn from; leave out on_policy, or train one without draft_vocabulary"
            )
        return self.own

    @property
    def drafting_part(self) -> TargetModel:
        return self.own

    def _write_ids(self) -> None:
        """Name the drafted ids in the model's config, which ``drafted_ids`` reads."""
        if self.drafted.part is not None:
            self.model.config.draft_vocabulary_ids = self.drafted.part.tolist()

    @classmethod
    def new(cls, config: DraftConfig | CheckpointConfig, target: TargetModel) -> Self:
        """Build a module from scratch, or from a copy of another model."""
        if isinstance(config, CheckpointConfig):
            model = read_model(config.draft, dtype=torch.float32)
        else:
            size = max(target.hidden.size // 2, 2)
            config = replace(config.sized(size), context=config.context or target.context or 2048)
            model = _from_scratch(config, target)
        made = cls(config, Fit.of(target), model).to(target.hidden.device).train()
        made.bind(target)
        made._chooses = isinstance(config, DraftConfig)
        return made

    @classmethod
    def begin(cls, draft: str, options: ChainConfig, target: TargetModel) -> Self:
        return cls.new(
            CheckpointConfig(draft=draft, num_speculative_tokens=options.num_speculative_tokens), target
        )

    def check(self, target: TargetModel) -> None:
        """Check that its tokens are the target's; the hidden sizes may differ.

        Raises:
            OutpaceError: the vocabularies differ.
        """
        name = self.config.draft if isinstance(self.config, CheckpointConfig) else "this one"
        remedy = "training needs a model with the target's own tokens; give another, or begin from scratch"
        if self.own.vocabulary != target.vocabulary:
            raise OutpaceError(
                f"draft_model: {name} has {self.own.vocabulary} token ids and the target "
                f"{target.vocabulary}; {remedy}"
            )
        own, theirs = (load_tokenizer(None, model, needed=False) for model in (self.model, target))
        differ = None if own is None or theirs is None else disagreement(own, theirs)
        if differ is not None:
            place, ours, other = differ
            raise OutpaceError(
                f"draft_model: token {place} is {ours!r} to {name}, {other!r} to the target; {remedy}"
            )

    def loss(self, batch: TrainingBatch, objective: Objective) -> Losses:
        at, places, labels, every = learnable(self.drafted, batch)
        depth = self._logits(batch, (at, places)), learnt_logits(self, batch, at, places), labels
        return among(measure(objective, [depth], [1.0]), every)

    @torch.no_grad()
    def accepted(self, batch: TrainingBatch) -> Tensor:
        """Number of accepted tokens of a chain of ``num_speculative_tokens``, at each place.

        Accepted tokens equal the text's, so one forward over the text computes every draft.
        """
        length = self.config.num_speculative_tokens
        after = F.pad(ids_of(self.drafted, self._logits(batch).argmax(dim=-1)), (0, length - 1))
        return accepted_of_chain(batch, after.unfold(1, length, 1))

    def _logits(self, batch: TrainingBatch, where: Any = ...) -> Tensor:
        """Logits [..., drafted ids] of the tokens after all places of a batch, or after those indexed."""
        same = batch.documents[:, :, None] == batch.documents[:, None]
        text = batch.tokens, batch.positions, same.tril()
        if self.drafted.part is None:
            return self.own.read(*text)[where]
        head = self.model.get_output_embeddings().weight[self.drafted.part]
        return F.linear(self.own.states(*text)[where], head)

    def save(self, folder: str | Path) -> None:
        """Write a transformers folder: ``config.json``, ``generation_config.json``, ``model.safetensors``."""
        self._write_ids()
        self.model.save_pretrained(folder)

    def accompany(self, folder: Path, tokenizer: Any) -> None:
        """Write the target's tokenizer, which is also the draft model's."""
        tokenizer.save_pretrained(folder)

    @classmethod
    def load(cls, folder: str | Path, target: TargetModel) -> Self:
        made = cls.new(CheckpointConfig(draft=str(folder)), target)
        made.requires_grad_(False).eval()
        return made.to(target.hidden.dtype)


def _from_scratch(config: DraftConfig, target: TargetModel) -> Any:
    """A Llama with random weights, and the target's special tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = getattr(target.model, "config", None)
    ends = sorted(target.eos_token_ids)
    made = LlamaConfig(
        **config.transformers(),
        vocab_size=target.vocabulary,
        num_hidden_layers=config.depth,
        tie_word_embeddings=config.tied,
        bos_token_id=getattr(theirs, "bos_token_id", None),
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=getattr(theirs, "pad_token_id", None),
    )
    return LlamaForCausalLM(made)

"""The encoder of a stock model, which reads the sources that its decoder decodes from."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from outpace.core import ContextOverflow, OutpaceError, Source
from outpace.targets.inputs.config import config_of, family, size_in
from outpace.targets.inputs.forward import device_of, embeddings_of
from outpace.targets.inputs.refusals import FEATURES, refuse_training
from outpace.transfer import upload


@dataclass
class EncodedStates(BaseModelOutput):
    """An encoder's output, with what models with experts read of it besides."""

    router_logits: Any = None


class Encoder:
    """The encoder of a model.

    Args:
        model: an encoder-decoder model.
        device: of features.

    Attributes:
        module: the encoder itself.
        size: of its states.
        shares_ids: its tokens are the decoder's.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self.module: Any = model.get_encoder()
        self.size = size_in(config_of(self.module, model).get_text_config(), "hidden_size", model)
        self.shares_ids = not self.reads_features and self._one_vocabulary()

    @torch.inference_mode()
    def encode(self, source: Any) -> Source:
        """Run the encoder over a source.

        Args:
            source: token ids; a tensor of features [bins, frames]; or a Source, which is returned unchanged.

        Raises:
            ContextOverflow: the source has more tokens than the encoder has positions.
            OutpaceError: there is no source, or the encoder cannot read it.
        """
        name = family(self._model)
        if source is None:
            raise OutpaceError(f"{name} is an encoder-decoder model: it needs a source besides the prompt")
        refuse_training(self._model)
        if isinstance(source, Source):
            if source.states.dim() != 2 or source.states.shape[1] != self.size or not len(source.states):
                found = list(source.states.shape)
                raise OutpaceError(f"{name} takes encoded sources [length, {self.size}], not {found}")
            return source
        if self.reads_features:
            return Source(self._read(self._features(source)))
        ids = self.ids(source)
        states = self._read(upload([ids], device_of(embeddings_of(self.module))))
        return self.source(states, ids)

    @property
    def reads_features(self) -> bool:
        """True if the encoder reads features; the decoder then attends to all of its output."""
        return bool(self._model.main_input_name == FEATURES)

    def source(self, states: Tensor, tokens: Sequence[int]) -> Source:
        """The encoder's output [length, size] for these tokens as a source."""
        return Source(states, tuple(tokens) if self.shares_ids else ())

    def _one_vocabulary(self) -> bool:
        """True if encoder and decoder share their token ids."""
        sizes = {len(embeddings_of(part).weight) for part in (self.module, self._model.get_decoder())}
        # Some Marian models have two vocabularies, possibly of one size; their config states it.
        return len(sizes) == 1 and bool(getattr(self._model.config, "share_encoder_decoder_embeddings", True))

    def ids(self, source: Any) -> list[int]:
        """Token ids of a source as plain integers."""
        name = family(self._model)
        try:
            ids = [operator.index(token) for token in source]
        except TypeError as error:
            raise OutpaceError(f"{name} reads text: a source is a list of token ids: {error}") from error
        vocabulary = embeddings_of(self.module).weight.shape[0]
        outside = [token for token in ids if not 0 <= token < vocabulary]
        if outside:
            raise OutpaceError(f"source: token {outside[0]} is outside its vocabulary of {vocabulary}")
        if not ids:
            raise OutpaceError("the source is empty: it needs at least one token")
        limit = getattr(self.module, "max_source_positions", None)
        if limit is not None and len(ids) > limit:
            raise ContextOverflow(
                f"the source has {len(ids)} tokens, the encoder {limit} positions; shorten the source"
            )
        return ids

    def _features(self, source: Any) -> Tensor:
        """Check features, [bins, frames], and add a batch axis."""
        if not isinstance(source, Tensor) or source.dim() != 2 or not source.is_floating_point():
            known = isinstance(source, Tensor)
            found = f"{source.dtype} {list(source.shape)}" if known else f"a {type(source).__name__}"
            raise OutpaceError(
                f"{family(self._model)} reads features: a source is floats [bins, frames], not {found}"
            )
        return source[None].to(self._device, self._model.dtype)

    def _read(self, batch: Tensor) -> Tensor:
        """The encoder's output [length, size] for one source with a batch axis."""
        try:
            states: Tensor = self.module(**{self._model.main_input_name: batch})[0]
        except ValueError as error:
            raise OutpaceError(f"{family(self._model)} cannot encode this source: {error}") from error
        return states[0]

"""Stock encoder-decoder transformers models: the decoder is the target, the encoder's output its source.

As with decoder-only models nothing is patched: the decoder gets a 4-D mask, its positions in one of three
ways (``positions.py``), and outpace's cache objects. The encoder runs once per source, without padding.
Cross-attention keys and values are computed once per slot and move with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EncoderDecoderCache, PreTrainedModel

from outpace.cache import Cache, Slot, Window
from outpace.core import OutpaceError, Source, UnsupportedModel
from outpace.native.pool import follow_torch
from outpace.targets.base import TargetModel, check_chains, checked_cache
from outpace.targets.batch import Batch
from outpace.targets.inputs.changes import Structure
from outpace.targets.inputs.config import cache_argument, config_of, context_of, end_tokens, family
from outpace.targets.inputs.forward import (
    CacheAdapter,
    device_of,
    embeddings_of,
    inputs_of,
    laid_out,
    rows_of,
)
from outpace.targets.inputs.masks import Mask, MaskMaker, NoMasks
from outpace.targets.inputs.positions import ByBias, Positioning, positioning_of
from outpace.targets.inputs.probe import Probe, probed
from outpace.targets.inputs.refusals import (
    TEXT,
    refuse_by_config,
    refuse_training,
    refuse_unread,
    why_chains_only,
)
from outpace.targets.inputs.versions import warn_of_untested
from outpace.targets.plan import StepPlan
from outpace.targets.rows import HiddenStates, Output
from outpace.targets.step.record import Record, answer
from outpace.targets.step.reference import StockModel
from outpace.targets.step.self_test import tested
from outpace.targets.stock.encoder import EncodedStates, Encoder
from outpace.targets.stock.seq2seq_cache import CrossRows, Seq2SeqCache
from outpace.transfer import upload

_TEST_LENGTHS = (7, 4)  # lengths of the self-test's two sources


class Seq2SeqTarget(TargetModel):
    """An encoder-decoder transformers model.

    A request's source is a list of token ids or, if the encoder reads features (Whisper), a tensor of
    features without a batch axis. It must not contain padding. The request's prompt is the decoder's initial
    tokens: ``start``, and any forced tokens.

    Construction runs a few forwards, as with ``CausalTarget``. The model is unchanged.

    Args:
        model: a loaded model in evaluation mode, on one device or spread over several.
        check: run the self-test; see ``CausalTarget``.

    Raises:
        UnsupportedModel: named by family, with the reason.
    """

    has_encoder: ClassVar[bool] = True
    plan = StepPlan(
        why_inexact="steps of encoder-decoder models run on stock modules, whose sums depend on other rows"
    )

    def __init__(self, model: PreTrainedModel, check: bool | Literal["auto"] = "auto") -> None:
        warn_of_untested()
        refuse_by_config(model, seq2seq=True)
        self._cache_argument = cache_argument(model)
        refuse_unread(model)
        self.model = model
        self._decoder: Any = model.get_decoder()
        self._structure = Structure(model)
        found = positioning_of(model)
        self._positioning = found if isinstance(found, Positioning) else Positioning()
        self.why_chains_only = why_chains_only(model, seq2seq=True) or (
            found if isinstance(found, str) else None
        )
        config = config_of(self._decoder, model)
        self._masks = NoMasks() if self.why_chains_only else MaskMaker(config, model.dtype)
        limits = getattr(self._decoder, "max_target_positions", None), context_of(model.config)
        self.context = next(filter(None, limits), context_of(config))
        self.eos_token_ids = end_tokens(model)
        self.start = _start(model)
        self.device = device_of(embeddings_of(self._decoder))
        self._encoder = Encoder(model, self.device)
        self.shares_ids = self._encoder.shares_ids
        self._probe()
        if check:
            record = Record.of_model(model, {}) if check == "auto" else None
            answer(record, "steps", model, lambda: tested(self, self.reference(), self._unchecked))

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> Seq2SeqCache:
        return Seq2SeqCache(self._layers, self._cross, slots, length, capacity)

    def replaced(self) -> str | None:
        return self._structure.changed()

    # -- the source --------------------------------------------------------------------------------------

    def encode(self, source: Any) -> Source:
        """Run the encoder over a source; see ``Encoder.encode``."""
        return self._encoder.encode(source)

    @property
    def reads_features(self) -> bool:
        """True if the encoder reads features; the decoder then attends to all of its output."""
        return self._encoder.reads_features

    @property
    def relative(self) -> bool:
        """True if the decoder's positions are relative: pads before a text, masked, do not shift them."""
        return isinstance(self._positioning, ByBias)

    def source(self, states: Tensor, tokens: Sequence[int]) -> Source:
        """The encoder's output [length, size] for these tokens as a source."""
        return self._encoder.source(states, tokens)

    @torch.inference_mode()
    def open(self, cache: Cache, source: Source | None = None, rows: int = 0) -> Slot:
        """Allocate a slot, and write the source's cross-attention keys and values.

        Raises:
            OutpaceError: there is no source; the model has other modules or another dtype; or the source's
                length differs from those in use, for an encoder of features, whose decoder does not mask
                parts of a source.
        """
        if (reason := self.replaced()) is not None:
            raise OutpaceError(reason)
        kv = checked_cache(self, cache, Seq2SeqCache)
        if source is None:
            raise OutpaceError(f"{family(self.model)} is an encoder-decoder model: a slot needs a source")
        length = len(source.states)
        others = {kv.sources.length(other) for other in kv.beside.values()} - {length}
        if self.reads_features and others:
            raise OutpaceError(
                f"{family(self.model)} masks no part of a source: decode sources of one length together, "
                f"not {length} beside {max(others)}"
            )
        made = self._start_of(source.states.to(self.device, self.model.dtype)[None])[1]
        slot = kv.allocate(rows)
        beside = kv.beside[slot]
        (window,) = kv.sources.begin({beside: length})
        for layer, pair in made.rows.items():
            window.append(layer, *pair)
        kv.sources.keep({beside: range(length)})
        return slot

    def _start_of(self, states: Tensor) -> tuple[Probe, Probe, Tensor]:
        """Decode a first token from a source: rows of self-attention and of cross-attention, and logits."""
        rows, cross = Probe(), Probe()
        token = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        mask = self._masks.token_mask(self.device)
        with self._positioning.during(token, token, mask):
            output = self.model(
                encoder_outputs=EncodedStates(last_hidden_state=states),
                decoder_input_ids=token,
                use_cache=True,
                **self._masked(mask),
                **self._positioning.arguments(token),
                **{self._cache_argument: EncoderDecoderCache(rows, cross)},
            )
        return rows, cross, output.logits

    # -- for trained drafters ----------------------------------------------------------------------------

    @property
    def hidden(self) -> HiddenStates:
        return HiddenStates(self._measured[0], self.model.dtype, self.device)

    @property
    def layers(self) -> int:
        return len(self._layers)

    def embed(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            embedded: Tensor = embeddings_of(self._decoder)(tokens)
        return embedded

    def head(self, states: Tensor) -> Tensor:
        """See ``TargetModel``.

        Raises:
            OutpaceError: the model does more with its decoder's output than to scale it and add a bias.
        """
        scale = self._measured[1]
        return super().head(states) if scale is None else self._scaled_head(states, scale)

    @cached_property
    def _measured(self) -> tuple[int, float | None]:
        """The size of the decoder's states, and their factor before the head, which T5 has.

        The factor is None if the logits are not those of states with a factor, and a bias. Measured only when
        asked for, since transformers leaves hooks in a model whose hidden states were read.
        """
        with torch.inference_mode():
            output = self.model(
                encoder_outputs=EncodedStates(
                    last_hidden_state=torch.zeros(
                        (1, 1, self._encoder.size), dtype=self.model.dtype, device=self.device
                    )
                ),
                decoder_input_ids=torch.zeros((1, 1), dtype=torch.long, device=self.device),
                output_hidden_states=True,
                use_cache=False,
            )
            states, logits = output.decoder_hidden_states[-1], output.logits.float()
            size: int = states.shape[-1]
            for scale in (1.0, size**-0.5):
                if (self._scaled_head(states, scale).float() - logits).std() < 0.02 * logits.std():
                    return size, scale
        return size, None

    def _scaled_head(self, states: Tensor, scale: float) -> Tensor:
        matrix: Any = self.model.get_output_embeddings()
        logits: Tensor = matrix(states.to(matrix.weight.dtype) * scale)
        bias = getattr(self.model, "final_logits_bias", None)
        return logits if bias is None else logits + bias[0]

    @torch.inference_mode()
    def read_texts(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], layers: Sequence[int], scored: bool
    ) -> tuple[list[dict[int, Tensor]], list[Tensor]]:
        """Hidden states of whole texts, and their logits if ``scored``, in one forward without a cache.

        Args:
            texts: source and text of each.
            layers: the layers whose states are returned.

        Raises:
            OutpaceError: the encoder cannot read a source.
        """
        refuse_training(self.model)
        if self.reads_features:
            raise OutpaceError(f"{family(self.model)} reads features, of which texts have none")
        each = [torch.tensor(self._encoder.ids(source)) for source, _ in texts]
        # Some encoders derive positions from the model's own pad.
        pad = self.model.config.pad_token_id or 0
        ids = upload(pad_sequence(each, batch_first=True, padding_value=pad), self.device)
        lengths = upload([len(source) for source in each], self.device)
        padded = pad_sequence([torch.tensor(text) for _, text in texts], batch_first=True)
        decoded = upload(padded, self.device)
        real = (torch.arange(ids.shape[1], device=self.device) < lengths[:, None]).long()
        more = {"output_hidden_states": bool(layers), "use_cache": False}
        if scored:
            output = self.model(input_ids=ids, attention_mask=real, decoder_input_ids=decoded, **more)
            found, logits = output.decoder_hidden_states, output.logits
        else:  # without the head
            read = self._encoder.module(input_ids=ids, attention_mask=real)[0]
            encoded = {"encoder_hidden_states": read, "encoder_attention_mask": real}
            found, logits = self._decoder(input_ids=decoded, **encoded, **more).hidden_states, None
        # Pads follow a text, so its places do not attend to them.
        sizes = [len(text) for _, text in texts]
        states = [{layer: found[layer][at, :size] for layer in layers} for at, size in enumerate(sizes)]
        return states, [] if logits is None else [logits[at, :size] for at, size in enumerate(sizes)]

    # -- the forward -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        refuse_training(self.model)
        check_chains(self, batch)
        kv = checked_cache(self, cache, Seq2SeqCache)
        follow_torch()
        widths = batch.width_by_slot
        windows = kv.begin(widths, groups=[[slot] for slot in widths] if self.why_chains_only else None)
        return Output.join([self._pass(kv, window, batch, hidden_layers) for window in windows])

    def _pass(
        self,
        cache: Seq2SeqCache,
        window: Window,
        batch: Batch,
        hidden_layers: Sequence[int],
    ) -> Output:
        """A forward of the model over one window."""
        rows = rows_of(window, batch.rows)
        tokens, positions = inputs_of(rows, window)
        ids, position_ids = upload([tokens, positions], self.device).unbind()
        mask = self._masks(rows, window, positions, self.device)
        if not isinstance(mask, dict):  # one per kind of layer is right as it is
            mask = self._positioning.mask(mask, rows, window, positions)
        with self._positioning.during(ids, position_ids, mask):
            output = self.model(
                decoder_input_ids=ids,
                **self._masked(mask),
                **self._attended(cache, window),
                **self._positioning.arguments(position_ids),
                **({"output_hidden_states": True} if hidden_layers else {}),
            )
        hidden = {layer: output.decoder_hidden_states[layer] for layer in hidden_layers}
        logits = output.logits if len(batch.read) else None
        return laid_out(window.slots, batch, logits, 0, hidden)

    def _masked(self, mask: Mask) -> dict[str, Any]:
        """Arguments of the model for the decoder's mask."""
        return {} if self.why_chains_only else {"decoder_attention_mask": mask}

    def _attended(self, cache: Seq2SeqCache, window: Window) -> dict[str, Any]:
        """Arguments of the model for a window's rows and the sources of its slots."""
        sizes = [cache.sources.length(cache.beside[slot]) for slot in window.slots if slot is not None]
        if not all(sizes):
            raise OutpaceError("a slot has no source: take slots of this target with open(cache, source)")
        count, lengths, longest = len(sizes), upload(sizes, self.device), max(sizes)
        # Only the shape of these states is used, since their keys and values are in the cache.
        states = torch.zeros((), dtype=self.model.dtype, device=self.device).expand(
            count, longest, self._encoder.size
        )
        rows = CacheAdapter(window, self._cache_layers)
        return {
            "encoder_outputs": EncodedStates(last_hidden_state=states),
            "attention_mask": (torch.arange(longest, device=self.device) < lengths[:, None]).long(),
            self._cache_argument: EncoderDecoderCache(
                rows, CrossRows(cache.sources.views(window.start, window.stop))
            ),
            "use_cache": True,
        }

    # -- construction ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _probe(self) -> None:
        """Determine the shape of each layer's rows, and the vocabulary."""
        states = torch.zeros((1, 1, self._encoder.size), dtype=self.model.dtype, device=self.device)
        source, token = Source(states[0]), torch.zeros((1, 1), dtype=torch.long, device=self.device)
        rows, cross, logits = probed(
            self.model,
            "a 4-D mask, an encoder's states and a cache object",
            partial(self._start_of, states),
            partial(self._run, self.model, source, token),
        )
        self._cache_layers, self._layers = rows.layout(self.model)
        order, self._cross = cross.layout(self.model)
        if any(layer != number for layer, number in order.items()):
            raise UnsupportedModel(f"{family(self.model)} reads its source in some of its layers only")
        self.vocabulary: int = logits.shape[-1]

    @staticmethod
    def _run(model: Any, source: Source | None, ids: Tensor, **options: Any) -> Any:
        """A plain forward over texts [B, n] decoded from one source."""
        assert source is not None
        more: dict[str, Any] = {}
        if model.main_input_name == TEXT:  # without a cache FSMT masks later tokens only if it has the source
            more["input_ids"] = torch.zeros(
                (len(ids), len(source.states)), dtype=torch.long, device=ids.device
            )
        states = source.states.expand(len(ids), -1, -1)
        return model(
            encoder_outputs=EncodedStates(last_hidden_state=states),
            decoder_input_ids=ids,
            use_cache=False,
            **more,
            **options,
        )

    def reference(self) -> StockModel:
        """The model that the self-test compares with."""
        embedded, parts = len(embeddings_of(self._decoder).weight), (self.model,)
        return StockModel(
            self.model, self._run, self._unchecked, embedded, parts, sources=self._test_sources()
        )

    @classmethod
    def _unchecked(cls, model: Any) -> Seq2SeqTarget:
        return cls(model, check=False)

    def _test_sources(self) -> tuple[Source, Source]:
        """Sources of noise, of different lengths unless the encoder reads features."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((_TEST_LENGTHS[0], self._encoder.size), generator=generator)
        noise = noise.to(self.device, self.model.dtype)
        other = noise.flip(0) if self.reads_features else noise[: _TEST_LENGTHS[1]]
        return Source(noise), Source(other)


def _start(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that the decoder starts with: the first, and the one that is forced after it, if any.

    From the generation config, or from the config where it has none.
    """
    names = ("decoder_start_token_id", "forced_bos_token_id")
    found = [
        next((token for config in configs if (token := getattr(config, name, None)) is not None), None)
        for name in names
        for configs in [(model.generation_config, model.config)]
    ]
    return tuple(int(token) for token in found if token is not None) if found[0] is not None else ()

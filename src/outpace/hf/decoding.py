"""Decoding loop called by generate(): decodes a prepared request and returns transformers' output types."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from outpace.core import ContextOverflow, OutpaceError, SamplingParams
from outpace.hf.checks import refusal, refuse_request
from outpace.hf.engines import Engines, Kept, LayerRows, RowEngine
from outpace.hf.rows import GenerateRow, Recording, for_row, split_criteria, split_warpers
from outpace.hf.sources import Sources, sources_of
from outpace.sequence import Sequence
from outpace.targets import TargetModel
from outpace.targets.inputs.config import CACHE


def filled(
    cache: Any, kept: Seq[Kept], pads: Seq[int], columns: int, seen: Tensor | None, model: Any
) -> DynamicCache | EncoderDecoderCache:
    """A cache of the committed rows, [rows, heads, columns, size]: zeros at pads and after the end.

    Args:
        cache: empty; filled in place where it is a plain DynamicCache.
        kept: per row of the batch.
        pads: number of pads before each row.
        columns: length of the prompt with pads and the output, minus the last token, which was never fed.
        seen: the columns of the encoder's output that each row attends to, boolean [rows, length]; None for
            a decoder-only model.
    """
    ends = [min(columns, front + row.own[0][0].shape[2]) for front, row in zip(pads, kept, strict=True)]
    places = [torch.arange(front, end) for front, end in zip(pads, ends, strict=True)]
    rows = [row.own for row in kept]
    if seen is None:
        return _filled(cache, rows, places, columns, model)
    made = cache if isinstance(cache, EncoderDecoderCache) else EncoderDecoderCache(cache, DynamicCache())
    made.self_attention_cache = _filled(made.self_attention_cache, rows, places, columns, model)
    made.cross_attention_cache = _filled(
        made.cross_attention_cache,
        [row.cross for row in kept],
        [row.nonzero()[:, 0] for row in seen],
        seen.shape[1],
        model,
    )
    made.is_updated = dict.fromkeys(range(len(kept[0].cross)), True)
    return made


def _filled(
    cache: Any, kept: Seq[Seq[LayerRows]], places: Seq[Tensor], columns: int, model: Any
) -> DynamicCache:
    """A DynamicCache with each sequence's rows at their columns."""
    plain = type(cache) is DynamicCache and not getattr(cache, "offloading", False)
    made = cache if plain else DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer in range(len(kept[0])):
        states = []
        for which in (0, 1):
            _, heads, _, size = kept[0][layer][which].shape
            state = kept[0][layer][which].new_zeros((len(kept), heads, columns, size))
            for row, (at, layers) in enumerate(zip(places, kept, strict=True)):
                state[row][:, at.to(state.device)] = layers[layer][which][0, :, : len(at)]
            states.append(state)
        made.update(states[0], states[1], layer)
    return made


_log = logging.getLogger(__name__)
_ROOM = 512  # new tokens for which the cache is sized at first; it grows
_DRAFT = 64  # additional rows for drafts


@dataclass(frozen=True)
class Request:
    """Arguments prepared by generate().

    Attributes:
        input_ids: [rows, length], left-padded.
        limit: maximum number of new tokens, at least 1, within the model's context.
        asked: the requested maximum, regardless of the context.
        stops: tokens that end a row.
        criteria: criteria that must be called for each token.
        pad: the token that pads rows that ended before others; None if no row does.
        sources: what rows are decoded from besides tokens, and the pads before each.
    """

    config: GenerationConfig
    input_ids: Tensor
    limit: int
    asked: int
    stops: list[int]
    criteria: list[Any]
    pad: int | None
    sources: Sources


class Decoder:
    """Callable for ``custom_generate``: the decoding loop, after transformers has prepared everything.

    Args:
        engines: lends an engine.
        streamer: receives new tokens, [rows] each time, and the end. The caller passes the prompt.
        healer: a tokenizer, to replace the prompt's last tokens by longer ones (``token_healing``); the
            streamer then receives the prompt too.
        prompt: what generate() puts into it in the streamer's place, which gets it once it is certain that
            the call is decoded.
    """

    def __init__(
        self, engines: Engines, streamer: Any = None, healer: Any = None, prompt: Seq[Tensor] = ()
    ) -> None:
        self._engines = engines
        self._streamer = streamer
        self._healer = healer
        self._prompt = prompt

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput | Tensor:
        """Decode; called by generate().

        Raises:
            OutpaceError: the request is not supported; the message names the remedy.
        """
        refuse_request(model, generation_config, logits_processor, model_kwargs)
        if self._healer is not None:
            input_ids = _healed(model, input_ids, self._healer)
            if self._streamer is not None:
                self._streamer.put(input_ids.cpu())
        cache = model_kwargs.get(CACHE)
        # Marks a caller's own cache; set by newer transformers and always by `Generate`.
        wanted = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        target = self._engines.target(model)
        request = _request(
            target, model, input_ids, stopping_criteria, generation_config, inputs_tensor, model_kwargs
        )
        rows = _rows(request, logits_processor)
        for value in self._prompt:
            self._streamer.put(value)
        with self._engines.alone, self._engines.lend(target) as engine:
            width = input_ids.shape[1] + min(request.limit, _ROOM) + _DRAFT
            engine.open(len(rows), width, keep=wanted and cache is not None)
            sequences = self._decode(engine, rows, request)
            length = _new_tokens(rows, sequences)
            if engine.kept is not None:
                kept = [engine.kept[sequence] for sequence in sequences]
                width = input_ids.shape[1] + length - 1
                sources = request.sources
                cache = filled(cache, kept, sources.pads, width, sources.seen, model)
        if length == request.limit < request.asked:
            _log.warning(
                "generation ended at the model's context of %d tokens; transformers would go past it",
                input_ids.shape[1] - min(request.sources.pads) + length,
            )
        tokens = _columns(sequences, 0, length, request.pad)
        text = torch.cat([input_ids, torch.tensor(tokens, device=input_ids.device).T], dim=1)
        if self._streamer is not None:
            self._streamer.end()
        if not generation_config.return_dict_in_generate:
            return text
        found: dict[str, Any] = {
            "sequences": text,
            "scores": _stack([row.record.scores for row in rows], length),
            "logits": _stack([row.record.logits for row in rows], length),
            CACHE: cache,
        }
        if model.config.is_encoder_decoder:
            return GenerateEncoderDecoderOutput(**found)
        return GenerateDecoderOnlyOutput(**found)

    def _decode(self, engine: RowEngine, rows: list[GenerateRow], request: Request) -> list[Sequence]:
        """Decode all rows to their end, and stream each column of new tokens once every row has it."""
        sequences = [
            engine.add(row.prompt, row.params, row.ends if row.needs_criteria else None, source=source)
            for row, source in zip(rows, request.sources.each, strict=True)
        ]
        sent = 0
        try:
            while any(sequence.finish_reason is None for sequence in sequences):
                engine.step()
                for sequence in sequences:
                    sequence.check()
                if self._streamer is not None:
                    running = [s.output_length for s in sequences if s.finish_reason is None]
                    ready = min(running) if running else _new_tokens(rows, sequences)
                    for column in _columns(sequences, sent, ready, request.pad):
                        self._streamer.put(torch.tensor(column))
                    sent = ready
        except Exception:  # of a streamer or a processor; what an interrupt leaves is renewed with the engine
            for sequence in sequences:
                engine.remove(sequence)
            raise
        return sequences


def _healed(model: Any, input_ids: Tensor, tokenizer: Any) -> Tensor:
    """Prompts [rows, length] healed by transformers; its masks and lengths are those from before."""
    healed: Tensor = model.heal_tokens(input_ids, tokenizer)
    if healed.shape != input_ids.shape:
        raise refusal(
            f"token_healing that makes {healed.shape[1]} tokens of a prompt of {input_ids.shape[1]}",
            "leave it out and pass model.heal_tokens(input_ids, tokenizer) as the prompt",
        )
    return healed


def _request(
    target: TargetModel,
    model: Any,
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    inputs: Tensor | None,
    model_kwargs: dict[str, Any],
) -> Request:
    sources = sources_of(target, model, input_ids, inputs, model_kwargs)
    pads = sources.pads
    longest, stops, others = split_criteria(criteria)
    length = input_ids.shape[1]
    # As in transformers' loop, which checks the length only after the first token.
    asked = sys.maxsize if longest is None else max(1, longest - length)
    context = target.context
    room = asked if context is None else context - (length - min(pads))
    if room < 1:
        raise ContextOverflow(
            f"a prompt of {length - min(pads)} tokens fills the model's context of {context}; shorten it"
        )
    pad = None
    if any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        pad = getattr(config, "_pad_token_tensor", None)
        if pad is None and len(input_ids) > 1:
            raise OutpaceError("rows that end before others need a pad token: pass pad_token_id")
    return Request(
        config=config,
        input_ids=input_ids,
        limit=min(asked, room),
        asked=asked,
        # transformers accepts end tokens that the model does not have; they are never emitted.
        stops=[token for token in stops if 0 <= token < target.vocabulary],
        criteria=others,
        pad=None if pad is None else int(pad),
        sources=sources,
    )


def _rows(request: Request, processors: LogitsProcessorList) -> list[GenerateRow]:
    """The rows of a request, each with its own processors, seed and records."""
    config, count = request.config, len(request.input_ids)
    rest: list[Any] = list(processors)
    sampling: dict[str, Any] = {}
    seeds: list[int | None] = [None] * count
    if config.do_sample:
        rest, found = split_warpers(rest)
        sampling = {"temperature": 1.0, **found}
        # The default generator, so that torch.manual_seed repeats a call.
        seeds = list(torch.randint(2**63 - 1, (count,)).tolist())
    recorded = bool(config.return_dict_in_generate)
    rows: list[GenerateRow] = []
    # With a pad token, a row that ended is padded; without one it keeps growing until all have ended.
    lockstep = rows if request.criteria and request.pad is None and count > 1 else ()
    for place in range(count):
        record = Recording(
            logits=[] if recorded and config.output_logits else None,
            scores=[] if recorded and config.output_scores else None,
        )
        params = SamplingParams(
            max_new_tokens=request.limit,
            seed=seeds[place],
            ignore_eos=True,
            stop_token_ids=request.stops,
            **sampling,
        )
        own = [for_row(processor, place, count) for processor in rest]
        ids, pads = request.input_ids[place], request.sources.pads[place]
        rows.append(GenerateRow(ids, pads, params, own, request.criteria, request.limit, record, lockstep))
    return rows


def _new_tokens(rows: Seq[GenerateRow], sequences: Seq[Sequence]) -> int:
    """New columns of the output, once every row has ended. In lockstep a row may have grown past them."""
    return max(
        sequence.output_length if row.ended is None else row.ended
        for row, sequence in zip(rows, sequences, strict=True)
    )


def _columns(sequences: Seq[Sequence], start: int, end: int, pad: int | None) -> list[list[int]]:
    """New tokens start .. end - 1 of all sequences, column by column, padded."""
    outputs = [sequence.output[start:end] for sequence in sequences]
    short = any(len(output) < end - start for output in outputs)
    assert not short or pad is not None
    padded = [[*output, *[pad or 0] * (end - start - len(output))] for output in outputs]
    return [list(column) for column in zip(*padded, strict=True)]


def _stack(records: Seq[list[Tensor] | None], length: int) -> tuple[Tensor, ...] | None:
    """For each new token [rows, vocabulary], zeros if a row had ended; None if nothing was recorded."""
    steps = []
    for step in range(length):
        column = []
        for record in records:
            if record is None:
                return None
            column.append(record[step] if step < len(record) else torch.zeros_like(record[0]))
        steps.append(torch.cat(column))
    return tuple(steps)

"""One row of a generate() call: its logits processors, stopping criteria, and recorded scores.

A row is processed on its own, one token after the other, as in a batch of one. Whatever transformers keeps
for the whole batch is reduced to the row first.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from outpace.core import LogitsProcessor, SamplingParams
from outpace.draws.sampling import processed, warp


@dataclasses.dataclass
class Recording:
    """Raw logits and processed scores of a row, each [1, vocabulary] float32; None if not requested."""

    logits: list[Tensor] | None
    scores: list[Tensor] | None


class RowProcessor:
    """A row's processors as one, called once per emitted token with the prefix and its scores.

    Args:
        processors: for this row alone.
        pads: ids of the pads before the prompt, [1, pads], on the prompt's device, where transformers'
            processors expect their inputs.
        warping: the warping that the sampler applies after the processors; needed for recording only.
        record: receives logits and scores.
    """

    def __init__(
        self, processors: Seq[LogitsProcessor], pads: Tensor, warping: SamplingParams, record: Recording
    ) -> None:
        self._processors = processors
        self._pads = pads
        self._warping = warping
        self._record = record

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        here = scores.device
        input_ids = torch.cat([self._pads, input_ids.to(self._pads.device)], dim=1)
        rows = scores.to(self._pads.device)
        if self._record.logits is not None:
            self._record.logits.append(rows.clone())
        for processor in self._processors:
            rows = processed(processor, input_ids, rows)
        if self._record.scores is not None:
            self._record.scores.append(warp(rows, self._warping).clone())
        return rows.to(here)


class GenerateRow:
    """A row as the engine decodes it.

    Args:
        input_ids: [length], including pads.
        pads: the number of pads at the start.
        params: sampling parameters, including the seed.
        processors: for this row alone.
        criteria: stopping criteria that the engine cannot evaluate itself.
        limit: the maximum number of tokens the row may emit.
        record: receives logits and scores.
        lockstep: all rows of the batch, if they must end together. (Without an end-of-sequence token
            transformers has nothing to pad with: a row ended by a criterion keeps growing until all have
            ended.)
    """

    def __init__(
        self,
        input_ids: Tensor,
        pads: int,
        params: SamplingParams,
        processors: Seq[LogitsProcessor],
        criteria: Seq[Any],
        limit: int,
        record: Recording,
        lockstep: Seq[GenerateRow] = (),
    ) -> None:
        self.pads = pads
        self.prompt: list[int] = input_ids[pads:].tolist()
        self.record = record
        self.ended: int | None = None  # length of the output when a criterion or the limit ended it
        self._front: list[int] = input_ids[:pads].tolist()
        self._device = input_ids.device
        self._criteria = criteria
        self._limit = limit
        self._lockstep = lockstep
        if processors or record.logits is not None or record.scores is not None:
            processor = RowProcessor(processors, input_ids[None, :pads], params, record)
            params = dataclasses.replace(params, logits_processors=(processor,))
        self.params = params

    @property
    def needs_criteria(self) -> bool:
        """True if ``ends`` must be called; the engine handles the limit and the stop tokens itself."""
        return bool(self._criteria)

    def ends(self, tokens: list[int]) -> bool:
        """True if the row ends with the last of ``tokens``, the prompt and output without pads."""
        count = len(tokens) - len(self.prompt)
        if self.ended is None and (self._criterion_met(tokens) or count >= self._limit):
            self.ended = count
        if self.ended is None:
            return False
        ends = [row.ended for row in self._lockstep]
        return None not in ends and count >= max((end for end in ends if end is not None), default=0)

    def _criterion_met(self, tokens: list[int]) -> bool:
        input_ids = torch.tensor([self._front + tokens], device=self._device)
        scores = None if self.record.scores is None else tuple(self.record.scores)
        # Call all of them, as transformers does: one may count its calls.
        met = [bool(criterion(input_ids, scores)) for criterion in self._criteria]
        return any(met)


def split_criteria(criteria: Seq[Any]) -> tuple[int | None, list[int], list[Any]]:
    """Split off the criteria that the engine handles itself.

    Returns:
        the maximum length in tokens (None: no limit), the tokens that end a text, the other criteria.
    """
    lengths, stops, others = [], [], []
    for criterion in criteria:
        # Exact types only: a subclass may decide differently.
        if type(criterion) is MaxLengthCriteria:
            lengths.append(int(criterion.max_length))
        elif type(criterion) is EosTokenCriteria:
            stops.extend(criterion.eos_token_id.tolist())
        else:
            others.append(criterion)
    return min(lengths, default=None), stops, others


def split_warpers(processors: Seq[LogitsProcessor]) -> tuple[list[LogitsProcessor], dict[str, Any]]:
    """Remove temperature, top-k, top-p and min-p from the end, which the engine applies identically.

    Drafters can then sample as the target will; processors are not applied to drafts.

    Returns:
        the other processors, and parameters for SamplingParams.
    """
    rest = list(processors)
    found: dict[str, Any] = {}
    for kind, name in (
        (stock.MinPLogitsWarper, "min_p"),
        (stock.TopPLogitsWarper, "top_p"),
        (stock.TopKLogitsWarper, "top_k"),
        (stock.TemperatureLogitsWarper, "temperature"),
    ):
        if not rest or type(rest[-1]) is not kind:
            continue
        warper: Any = rest[-1]
        usual = getattr(warper, "filter_value", -torch.inf) == -torch.inf
        kept = 1 if name == "top_k" else getattr(warper, "min_tokens_to_keep", 1)
        if not usual or kept != 1 or not getattr(warper, name) > 0:
            break
        found[name] = getattr(warper, name)
        rest.pop()
    return rest, found


def for_row(processor: Any, row: int, rows: int) -> LogitsProcessor:
    """Reduce a processor that holds something per row of the batch to one row of ``rows``."""
    if isinstance(processor, stock.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return stock.PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(row, sent), num_beams=1)
    mine = copy.copy(processor)
    if isinstance(processor, stock.RepetitionPenaltyLogitsProcessor):
        # The pads of each row, to skip them. (Older transformers penalise pads.)
        if isinstance(processor.prompt_ignore_length, Tensor):
            mine.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return mine  # type: ignore[no-any-return]
    if isinstance(processor, stock.EncoderRepetitionPenaltyLogitsProcessor):
        prompt = row * len(processor.encoder_input_ids) // rows  # prompts come before num_return_sequences
        mine.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
        return mine  # type: ignore[no-any-return]
    if isinstance(processor, stock.EncoderNoRepeatNGramLogitsProcessor):
        mine.generated_ngrams = [processor.generated_ngrams[row * processor.batch_size // rows]]
        mine.batch_size = 1
        return mine  # type: ignore[no-any-return]
    if isinstance(processor, stock.WhisperNoSpeechDetection):
        return _NoSpeech(processor, row, rows)
    if isinstance(processor, stock.SynthIDTextWatermarkLogitsProcessor):
        mine.state = None
        return mine  # type: ignore[no-any-return]
    return processor  # type: ignore[no-any-return]


class _NoSpeech:
    """Whisper's detector of silence for one row.

    Whisper reads the probabilities of all rows from the detector itself, which at the first token either runs
    the model over the whole batch or takes them from the scores.
    """

    def __init__(self, detector: Any, row: int, rows: int) -> None:
        self._detector = detector
        self._row = row
        self._whole = detector.start_of_trans_offset > 1
        if not self._whole:
            detector._no_speech_prob = [0.0] * rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._whole:
            if self._row == 0:
                self._detector(input_ids, scores)
            return scores
        if input_ids.shape[1] == self._detector.begin_index:
            mine = copy.copy(self._detector)
            mine(input_ids, scores)
            self._detector._no_speech_prob[self._row] = mine.no_speech_prob[0]
        return scores

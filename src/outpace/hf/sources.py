"""The sources of the rows of a generate() call: an encoder's output, or prompts with images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.core import Source
from outpace.hf.checks import IMAGES, left_pads, refusal
from outpace.targets import MultimodalTarget, Seq2SeqTarget, TargetModel
from outpace.targets.inputs.config import CACHE


@dataclass(frozen=True)
class Sources:
    """Sources of a call's rows.

    Attributes:
        pads: number of pads before each row's prompt.
        each: per row of the batch.
        seen: the columns of the encoder's output that each row attends to, boolean [rows, length]; None
            without an encoder.
    """

    pads: list[int]
    each: list[Source | None]
    seen: Tensor | None = None


def sources_of(
    target: TargetModel, model: Any, input_ids: Tensor, inputs: Tensor | None, prepared: dict[str, Any]
) -> Sources:
    """The sources of a prepared call, and the pads before its prompts.

    Args:
        input_ids: the decoder's, [rows, length].
        inputs: the model's main input; an encoder's, if there is one.
        prepared: what transformers would pass to the model's forward.

    Raises:
        OutpaceError, UnsupportedModel: the call is not supported; the message names the remedy.
    """
    if isinstance(target, Seq2SeqTarget):
        return _encoded(target, _decoder_pads(target, model, input_ids, prepared), inputs, prepared)
    mask, positions = prepared.get("attention_mask"), prepared.get("position_ids")
    several_axes = positions is not None and positions.dim() == 3
    # transformers passes an empty dict for a prompt without images.
    images = any(prepared.get(name) is not None and len(prepared[name]) for name in IMAGES)
    if not isinstance(target, MultimodalTarget) or not (images or several_axes):
        pads = left_pads(input_ids, mask, positions)
        return Sources(pads, [None] * len(pads))
    pads = left_pads(input_ids, mask, None)
    rest = {name: value for name, value in prepared.items() if name not in (CACHE, "use_cache")}
    given = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **rest)
    return Sources(pads, [*target.prompts(given, pads)])


def _encoded(
    target: Seq2SeqTarget, pads: list[int], inputs: Tensor | None, prepared: dict[str, Any]
) -> Sources:
    """The encoder's output that generate() has computed, a source per row, without pads."""
    states: Tensor = prepared["encoder_outputs"][0]
    rows, length = states.shape[:2]
    mask = prepared.get("attention_mask")
    # A decoder of audio attends to the whole source: its mask is of the features.
    if mask is None or target.reads_features:
        seen = torch.ones((rows, length), dtype=torch.bool, device=states.device)
    else:
        seen = mask.to(states.device) != 0
    if not bool(seen.any(dim=1).all()):
        raise refusal("an encoder's input of pads alone", "give each row at least one token")
    each: list[Source | None] = []
    for row in range(rows):
        tokens: tuple[int, ...] = ()
        own = None if inputs is None else inputs[row * len(inputs) // rows]
        if (
            own is not None
            and own.shape == seen[row].shape
            and not own.is_floating_point()
            and own.min() >= 0
        ):
            tokens = tuple(own[seen[row].to(own.device)].tolist())
        each.append(target.source(states[row, seen[row]], tokens))
    return Sources(pads, each, seen)


def _decoder_pads(
    target: Seq2SeqTarget, model: Any, input_ids: Tensor, prepared: dict[str, Any]
) -> list[int]:
    """The number of pads at the start of each row of the decoder's prompt."""
    mask = prepared.get("decoder_attention_mask")
    pads = left_pads(input_ids, mask, prepared.get("decoder_position_ids"))
    if any(pads) and not target.relative:
        given = model.prepare_inputs_for_generation(input_ids, **prepared)
        if given.get("decoder_position_ids") is None:
            raise refusal(
                "decoder_input_ids with pads, which this decoder counts as positions",
                "decode prompts of one length together",
            )
    return pads

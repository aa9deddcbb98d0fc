"""Refusal of generate() calls that outpace cannot decode, with the remedy."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from outpace.core import OutpaceError
from outpace.hf.arguments import unknown
from outpace.targets.inputs.config import CACHE, is_multimodal

# What generate() itself puts into model_kwargs for a text model. Anything other than these changes the
# forward.
_KNOWN = {
    "attention_mask",
    "position_ids",
    CACHE,
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
# Inputs of a model of images and text, which matter in the forward over the prompt alone.
IMAGES = {
    "mm_encoder_outputs",
    "image_hidden_states",
    "pixel_values",
    "pixel_attention_mask",
    "pixel_values_videos",
    "image_sizes",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "mm_token_type_ids",
}
# What generate() itself puts into model_kwargs for an encoder-decoder model.
_KNOWN_OF_SEQ2SEQ = _KNOWN | {"encoder_outputs", "decoder_attention_mask", "decoder_position_ids"}
_BEAMS = {
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.GROUP_BEAM_SEARCH,
    GenerationMode.CONSTRAINED_BEAM_SEARCH,
}


class NotDecoded(OutpaceError):
    """A call that transformers decodes and outpace does not.

    Attributes:
        what: the argument, or what else it is about.
        remedy: what to do instead.
    """

    def __init__(
        self,
        what: str,
        remedy: str,
        other: str = "accelerate(model, fallback=True), or outpace.restore(model)",
    ) -> None:
        super().__init__(
            f"outpace does not decode with {what}: {remedy}, or let transformers decode ({other})"
        )
        self.what, self.remedy = what, remedy


def refusal(what: str, remedy: str) -> NotDecoded:
    """The error for something outpace cannot do; it ends with how to use transformers' own loop instead."""
    return NotDecoded(what, remedy)


def names_adapters(model: Any) -> bool:
    """True during a call of PEFT with ``adapter_names``, an adapter per row, which it passes by hooks."""
    return any(
        isinstance(hook, partial) and "adapter_names" in hook.keywords
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Refuse the arguments that generate() does not pass to a callable, so that only the wrapper sees them.

    Raises:
        OutpaceError: there is an assistant model, synced_gpus, a paged cache, or return_token_timestamps.
    """
    if arguments.get("cache_implementation") == "paged":  # generate() would call generate_batch()
        raise _paged()
    if arguments.get("assistant_model") is not None:
        raise refusal("assistant_model", "name a drafter instead, in outpace.accelerate(model, drafter)")
    if arguments.get("synced_gpus"):
        raise refusal("synced_gpus", "pass synced_gpus=False and run one whole model in each process")
    if arguments.get("return_token_timestamps"):  # refused before Whisper switches the model's attention
        raise refusal("return_token_timestamps, which need attentions", "pass return_timestamps=True")


def _paged() -> OutpaceError:
    return refusal("a paged cache (continuous batching)", "leave cache_implementation out")


def refuse_request(
    model: Any,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse a prepared request that outpace cannot decode.

    Args:
        config: as prepared by generate().
        processors: as prepared by generate().
        model_kwargs: what transformers would pass to the model's forward.

    Raises:
        OutpaceError: the message names the remedy.
    """
    for name in unknown(config):
        raise refusal(f"{name}, which it does not know", "leave it out")
    _refuse_mode(config)
    _refuse_model(model)
    guided = any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors)
    if guided or config.guidance_scale not in (None, 1):
        raise refusal("guidance_scale", "leave it out, or pass guidance_scale=1")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise refusal(name, "leave it out and run model(output.sequences) once for them")
    if model_kwargs.get("inputs_embeds") is not None:
        raise refusal("inputs_embeds", "pass the prompt as input_ids")
    known, remedy = _KNOWN, "pass input_ids and attention_mask only"
    if model.config.is_encoder_decoder:
        known, remedy = _KNOWN_OF_SEQ2SEQ, "pass the encoder's input and attention_mask only"
    elif is_multimodal(model.config):
        known, remedy = _KNOWN | IMAGES, "pass input_ids, attention_mask and images only"
    for name, value in model_kwargs.items():
        # transformers passes an empty dict for a prompt without images.
        if name not in known and not (value is None or value is False or value == {}):
            raise refusal(f"the model argument {name}", remedy)
    _refuse_cache(config, model_kwargs.get(CACHE))


def _refuse_mode(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if config.prompt_lookup_num_tokens is not None:
        raise refusal("prompt_lookup_num_tokens", "leave it out; a drafter does its work")
    if config.is_assistant:
        raise refusal("is_assistant", "leave it out; it is for a model that drafts for another")
    if mode in _BEAMS:
        given = [name for name in ("constraints", "force_words_ids") if getattr(config, name, None)]
        named = given or [f"num_beams={config.num_beams}"]
        raise refusal(f"beam search ({', '.join(named)})", "pass num_beams=1 and no constraints")
    if mode == GenerationMode.DOLA_GENERATION:
        raise refusal("DoLa (dola_layers)", "leave dola_layers out")
    if mode == GenerationMode.CONTRASTIVE_SEARCH:
        raise refusal("contrastive search (penalty_alpha)", "leave penalty_alpha out")
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise refusal(f"transformers' {mode.value}", "leave its options out; a drafter does its work")


def _refuse_model(model: Any) -> None:
    if model.training:
        raise refusal("a model in training mode (its dropout is random)", "call model.eval() first")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1 and _sharded(model):
        raise refusal("FSDP or ZeRO-3 (synced_gpus)", "run one whole model in each process")


def _sharded(model: Any) -> bool:
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def _refuse_cache(config: GenerationConfig, cache: Any) -> None:
    if config.cache_implementation == "paged":
        raise _paged()
    if config.cache_implementation == "quantized":
        raise refusal("a quantized cache, which changes the tokens", "leave cache_implementation out")
    # A cache made for cache_implementation is transformers' own and still empty: it is left unused.
    if cache is None or config.cache_implementation is not None:
        return
    if not isinstance(cache, DynamicCache | EncoderDecoderCache):
        kind = type(cache).__name__
        raise refusal(f"a cache of type {kind}", "pass none, or an empty DynamicCache")
    if cache.get_seq_length() > 0:
        raise refusal("a cache that is filled", "pass the whole text as input_ids and no cache")


def left_pads(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[int]:
    """The number of pads at the start of each row.

    Args:
        input_ids: [rows, length].
        mask: of the same shape, nonzero at real tokens; None if all are.
        positions: position_ids, [rows or 1, length]; None for the usual ones.

    Raises:
        OutpaceError: the mask is not that of a left-padded batch, or the positions do not count from 0.
    """
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise refusal(f"an attention mask {tuple(mask.shape)}", f"pass one of shape {tuple(input_ids.shape)}")
    real = mask.to(input_ids.device) != 0
    if not bool(real[:, -1].all()):
        raise refusal("right padding (or an empty row)", "pad on the left: tokenizer.padding_side = 'left'")
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise refusal(
            "an attention mask with holes",
            "mask the pads on the left only (without attention_mask transformers masks every pad token)",
        )
    usual = real.long().cumsum(dim=1) - 1
    if positions is not None and not (
        positions.shape[-1:] == usual.shape[-1:]
        and positions.dim() == 2
        and bool(((positions.to(usual.device) == usual) | ~real).all())
    ):
        raise refusal("custom position_ids", "leave them out; they count from each row's first token")
    pads: list[int] = (~real).sum(dim=1).tolist()
    return pads

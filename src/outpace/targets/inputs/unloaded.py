"""Refusals by a model's class and config alone, before a weight is read or memory spent."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outpace.core import UnsupportedModel
from outpace.targets.inputs.config import family
from outpace.targets.inputs.refusals import (
    keeps_states,
    needed,
    not_taken,
    refuse_capacity,
    refuse_state,
    refuse_unread,
    state_refused,
    why_chains_only,
)
from outpace.targets.inputs.states import CONVOLUTION

# Type of a family -> the reason why it is refused, where neither its class nor its config shows it.
_PADS = "counts positions from the id of its pad on, and does not count pads: outpace counts from 0"
_MASK = "reads a mask that its encoder returns, of which outpace keeps the states alone"
_NO_TEXT = "takes no step without features of what it reads beside text"
_NO_TABLE = "has no single table of embeddings: it reads more than a text's tokens"
KNOWN = MappingProxyType({
    "camembert": _PADS,
    "canary": _MASK,
    "cohere_asr": _MASK,
    "cpmant": "takes no mask that fits what is in a cache",
    "data2vec-text": _PADS,
    "diffusion_gemma": "fills in the tokens of a block in any order, not one after another",
    "idefics": _NO_TEXT,
    "kosmos-2": _NO_TEXT,
    "kosmos-2.5": _PADS,
    "kyutai_speech_to_text": _NO_TABLE,
    "modernbert-decoder": "names its head a decoder, so that its layers are not found",
    "moshi": "has a window other than its config's",
    "pp_formulanet": _NO_TABLE,
    "prophetnet": "takes one token at a time once there is a cache",
    "roberta": _PADS,
    "roberta-prelayernorm": _PADS,
    "speech_to_text": _PADS,
    "udop": _MASK,
    "voxtral_realtime": _NO_TEXT,
    "xlm": "takes masks of whole texts alone",
    "xlm-roberta": _PADS,
    "xlm-roberta-xl": _PADS,
    "xmod": _PADS,
})  # fmt: skip


def refuse_unloaded(loader: Any, config: Any) -> None:
    """Refuse a model that would be refused once it is loaded.

    Args:
        loader: transformers' class that would load it, such as AutoModelForCausalLM.

    Raises:
        UnsupportedModel: named by family, with the reason.
    """
    try:  # not by ``in``, which finds no type that transformers has under two names, as Evolla
        kinds = getattr(loader, "_model_mapping", {})[type(config)]
    except KeyError:
        return  # code that comes with the model
    kind = kinds[0] if isinstance(kinds, tuple) else kinds
    model = _without_parts(kind, config)
    if why := KNOWN.get(config.model_type):
        raise UnsupportedModel(f"{family(model)} {why}")
    states = keeps_states(model)
    # Loaded as a causal language model, it is the decoder alone.
    seq2seq = config.is_encoder_decoder and loader is not AutoModelForCausalLM
    refuse_state(model, states)
    if missing := not_taken(model, needed(model, seq2seq)):
        raise UnsupportedModel(
            f"{family(model)} takes no {missing}, so a draft cannot follow what is in a cache"
        )
    refuse_capacity(model)
    if seq2seq:
        refuse_unread(model)
    if not config.is_encoder_decoder:
        why_chains_only(model, states=states)
    if states and not hasattr(sys.modules[kind.__module__], CONVOLUTION):
        raise UnsupportedModel(f"{family(model)} {state_refused(model)}")


def _without_parts(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """An instance of a class with a config and without modules, for questions that need no more."""
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    return model

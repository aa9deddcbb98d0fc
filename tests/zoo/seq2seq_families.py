"""Encoder-decoder families as data: a small random configuration of each, and how to build the model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from zoo.family import VOCABULARY, randomise

START = 2
FRAMES = 24  # of the features that an encoder of audio reads

_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    # Few and near, so that the prompts reach every bucket.
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 20,
}
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
_WHISPER = {
    **{name: value for name, value in _BART.items() if name != "max_position_embeddings"},
    "num_mel_bins": 8,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


@dataclass(frozen=True)
class Seq2SeqFamily:
    """A family and a configuration of it.

    Attributes:
        model: name of its class in transformers; that of its config is next.
        options: of the config, beside the common ones.
        features: whether its encoder reads features instead of tokens.
        seed: of the weights; 0 unless that model loops.
    """

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    features: bool = False
    seed: int = 0

    def build(self, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> PreTrainedModel:
        """A model with random weights, the same in every run; nothing is forced and nothing ends its text."""
        config = getattr(transformers, self.config)(
            **{
                "vocab_size": VOCABULARY,
                "tie_word_embeddings": False,
                "decoder_start_token_id": START,
                "pad_token_id": 0,
                "bos_token_id": None,
                "eos_token_id": None,
                "forced_eos_token_id": None,
                **self.options,
            }
        )
        kind = getattr(transformers, self.model)
        # In older transformers some families have no sdpa.
        config._attn_implementation = attention if kind._supports_sdpa else "eager"
        model: PreTrainedModel = kind(config).to(dtype).eval()
        randomise(model, self.seed)
        return model

    def sources(self, lengths: tuple[int, ...]) -> list[Any]:
        """One source for each of these lengths: token ids without pads, or features (all of one length)."""
        if self.features:
            noise = torch.Generator().manual_seed(0)
            return [torch.randn((8, FRAMES), generator=noise) for _ in lengths]
        return [random.Random(length).choices(range(1, VOCABULARY), k=length) for length in lengths]


SEQ2SEQ_FAMILIES: dict[str, Seq2SeqFamily] = {
    "t5": Seq2SeqFamily("T5ForConditionalGeneration", "T5Config", _T5),
    "t5-gated": Seq2SeqFamily(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 2, "num_layers": 3},
    ),
    "mt5": Seq2SeqFamily("MT5ForConditionalGeneration", "MT5Config", _T5),
    "bart": Seq2SeqFamily("BartForConditionalGeneration", "BartConfig", _BART),
    "mbart": Seq2SeqFamily("MBartForConditionalGeneration", "MBartConfig", _BART),
    "marian": Seq2SeqFamily("MarianMTModel", "MarianConfig", _BART),
    "marian-two-vocabularies": Seq2SeqFamily(
        "MarianMTModel",
        "MarianConfig",
        {
            **_BART,
            "vocab_size": 120,
            "decoder_vocab_size": VOCABULARY,
            "share_encoder_decoder_embeddings": False,
        },
    ),
    "pegasus": Seq2SeqFamily("PegasusForConditionalGeneration", "PegasusConfig", _BART),
    "whisper": Seq2SeqFamily("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, features=True),
}

_NO_CONTEXT = {name: value for name, value in _BART.items() if name != "max_position_embeddings"}
_BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_GEMMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}

# Families whose decoder's table counts positions from the cache, or whose layers are of several kinds.
COUNTING_FAMILIES: dict[str, Seq2SeqFamily] = {
    "m2m-100": Seq2SeqFamily("M2M100ForConditionalGeneration", "M2M100Config", _BART),
    "mvp": Seq2SeqFamily("MvpForConditionalGeneration", "MvpConfig", _BART),
    "pegasus-x": Seq2SeqFamily(
        "PegasusXForConditionalGeneration",
        "PegasusXConfig",
        {**_BART, "block_size": 8, "num_global_tokens": 2},
    ),
    "fsmt": Seq2SeqFamily(
        "FSMTForConditionalGeneration",
        "FSMTConfig",
        {
            **_BART,
            "langs": ["en", "de"],
            "src_vocab_size": VOCABULARY,
            "tgt_vocab_size": VOCABULARY,
            "num_beams": 1,
        },
    ),
    "seamless-m4t": Seq2SeqFamily(
        "SeamlessM4TForTextToText", "SeamlessM4TConfig", {"hidden_size": 32, **_NO_CONTEXT}
    ),
    "t5gemma": Seq2SeqFamily(
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        {"encoder": _GEMMA, "decoder": {**_GEMMA, "cross_attention_hidden_size": 32}},
    ),
}

# Families that take chains only.
CHAIN_FAMILIES: dict[str, Seq2SeqFamily] = {
    "umt5": Seq2SeqFamily("UMT5ForConditionalGeneration", "UMT5Config", _T5),
    "led": Seq2SeqFamily(
        "LEDForConditionalGeneration",
        "LEDConfig",
        {
            **_NO_CONTEXT,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
            "attention_window": 8,
        },
    ),
    "nllb-moe": Seq2SeqFamily(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {**_BART, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    ),
    "t5gemma2": Seq2SeqFamily(
        "T5Gemma2ForConditionalGeneration",
        "T5Gemma2Config",
        {
            "encoder": {"text_config": _GEMMA, "vision_config": _VISION, "image_token_index": 90},
            "decoder": {**_GEMMA, "eos_token_id": None, "bos_token_id": None},
            "image_token_index": 90,
            "eoi_token_index": 91,
        },
    ),
    "encoder-decoder": Seq2SeqFamily(
        "EncoderDecoderModel",
        "EncoderDecoderConfig",
        {"encoder": _BERT, "decoder": {**_BERT, "is_decoder": True, "add_cross_attention": True}},
    ),
}

# Families of slow tests in float32 alone.
FURTHER_FAMILIES: dict[str, Seq2SeqFamily] = {
    "longt5": Seq2SeqFamily("LongT5ForConditionalGeneration", "LongT5Config", {**_T5, "local_radius": 4}),
    "seamless-m4t-v2": Seq2SeqFamily(
        "SeamlessM4Tv2ForTextToText", "SeamlessM4Tv2Config", {"hidden_size": 32, **_NO_CONTEXT}
    ),
}
FURTHER_CHAINS: dict[str, Seq2SeqFamily] = {
    "florence2": Seq2SeqFamily(
        "Florence2ForConditionalGeneration",
        "Florence2Config",
        {
            "text_config": {
                **_BART,
                "vocab_size": VOCABULARY,
                "bos_token_id": None,
                "eos_token_id": None,
                "decoder_start_token_id": START,
                "forced_eos_token_id": None,
            },
            "vision_config": {
                "embed_dim": [8, 8, 8, 8],
                "num_heads": [2, 2, 2, 2],
                "num_groups": [2, 2, 2, 2],
                "depths": [1, 1, 1, 1],
                "projection_dim": 32,
            },
            "image_token_id": VOCABULARY - 1,
        },
    ),
}

# A family and the attention it runs on: one of two in turns; the other is slow.
SEQ2SEQ_RUNS = [
    pytest.param(name, attention, marks=() if (place + half) % 2 else pytest.mark.slow)
    for place, name in enumerate(SEQ2SEQ_FAMILIES)
    for half, attention in enumerate(("sdpa", "eager"))
]

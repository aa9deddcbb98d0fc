"""Families of text and images as data: a small random model of each, and prompts for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from zoo.family import VOCABULARY, randomise

IMAGE, START, END = 90, 92, 93  # placeholder of an image's rows, and the tokens around Qwen2-VL's
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
# Qwen2-VL's three axes of positions share the four frequencies of a head.
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_QWEN_VISION = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
_QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_IDEFICS = {
    "vision_config": {**_VISION, "image_size": 16},
    "text_config": {"model_type": "llama", **_TEXT},
    "image_token_id": IMAGE,
    "scale_factor": 2,
}

# Name -> prefix of its classes in transformers, config.
IMAGE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "Llava",
        {
            "vision_config": {"model_type": "clip_vision_model", **_VISION, "image_size": 8},
            "text_config": {"model_type": "llama", **_TEXT},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {
            "vision_config": {**_QWEN_VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
            "text_config": {**_TEXT, **_MROPE},
            **_QWEN,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "vision_config": {
                **_QWEN_VISION,
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": 32,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "text_config": {**_TEXT, **_MROPE},
            **_QWEN,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "vision_config": {
                **_QWEN_VISION,
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": 32,
                "deepstack_visual_indexes": [0, 1],
                "num_position_embeddings": 16,
            },
            "text_config": {
                **_TEXT,
                "head_dim": 8,
                "rope_parameters": {**_MROPE["rope_parameters"], "mrope_interleaved": True},
            },
            **_QWEN,
        },
    ),
    "smolvlm": ("SmolVLM", _IDEFICS),
    "idefics3": ("Idefics3", _IDEFICS),
}


def build(name: str) -> PreTrainedModel:
    """A model in float64 with random weights, the same in every run; nothing ends its text."""
    prefix, options = IMAGE_FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**options)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    model = model.double().eval()
    randomise(model, 0)
    return model


def prompts(name: str, images: Sequence[int], seed: int = 0, more: int = 0) -> dict[str, Any]:
    """Prompts of different lengths as a processor would return them, padded on the left.

    Args:
        images: number of images in each prompt.
        seed: of the images; the tokens do not depend on it.
        more: number of further tokens at the end.
    """
    noise = torch.Generator().manual_seed(seed)
    rows, pixels, grids = [], [], []
    for row, count in enumerate(images):
        ids = random.Random(row).choices(range(1, 89), k=3 + row)
        for number in range(count):
            if name.startswith("qwen"):
                grid = [1, 4, 4 if (row + number) % 2 else 8]
                patches = grid[1] * grid[2]
                grids.append(grid)
                pixels.append(torch.randn(patches, 3 * 2 * 4 * 4, generator=noise))
                ids += [START, *[IMAGE] * (patches // 4), END]
            else:
                side = 8 if name == "llava" else 16
                pixels.append(torch.randn(3, side, side, generator=noise))
                ids += [IMAGE] * 4
            ids += random.Random(10 * row + number).choices(range(1, 89), k=2 + number)
        rows.append([*ids, *random.Random(-row).choices(range(1, 89), k=more)])
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    found = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if not pixels:
        return found
    if name == "llava":
        return {**found, "pixel_values": torch.stack(pixels).double()}
    if name.startswith("qwen"):
        more = {"image_grid_thw": torch.tensor(grids), "mm_token_type_ids": (ids == IMAGE).int()}
        return {**found, **more, "pixel_values": torch.cat(pixels).double()}
    padded = torch.zeros(len(images), max(images), 3, 16, 16, dtype=torch.float64)
    given = iter(pixels)
    for row, count in enumerate(images):
        for number in range(count):
            padded[row, number] = next(given)
    return {**found, "pixel_values": padded}

"""A tiny model of text and images in a folder, with a processor and a template, as models are published."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import outpace
from outpace.loading import Loaded
from zoo.family import randomise
from zoo.image_families import IMAGE_FAMILIES

MARK = "<image>"
PARTED = (  # texts as parts of a list alone, as SmolVLM's template has them
    "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{% if c.type == 'image' %}<image>{% elif "
    "c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@lru_cache(maxsize=1)
def folder() -> Path:
    """A model of four layers in all, whose images are eight by eight pixels and four tokens."""
    place = Path(mkdtemp())
    tokenizer = outpace.load().tokenizer
    tokenizer.add_tokens([MARK], special_tokens=True)
    mark = tokenizer.convert_tokens_to_ids(MARK)
    _, options = IMAGE_FAMILIES["llava"]
    text = {**options["text_config"], "vocab_size": mark + 1, "max_position_embeddings": 512}
    config = transformers.LlavaConfig(**{**options, "text_config": text, "image_token_index": mark})
    model = transformers.LlavaForConditionalGeneration(config).double().eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    randomise(model, 0)
    model.save_pretrained(place)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    transformers.LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=PARTED,
    ).save_pretrained(place)
    return place


@lru_cache(maxsize=1)
def seeing() -> Loaded:
    """The model in float64, with its processor."""
    return outpace.load(str(folder()), "float64", "cpu", seq2seq="images")


def picture(seed: int, form: str = "PNG", side: int = 12) -> bytes:
    """An image of noise, as a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

"""Prompts with images of a model that reads them, by its processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers

from outpace.core import OutpaceError, first_line, need
from outpace.targets import MultimodalTarget, TargetModel

_SIDE = 64  # pixels of the image that tests a model


@dataclass(frozen=True)
class ImageProcessor:
    """The processor of a model of text and images.

    Attributes:
        mark: what stands for an image in a text.
    """

    processor: Any
    mark: str

    def prompt(self, text: str, images: Sequence[Any]) -> tuple[list[int], Mapping[str, Any]]:
        """Token ids of a prompt, places of images included, and the source of its request.

        Args:
            text: rendered by the template, with a mark for each image.
            images: of Pillow, in the order of their marks.

        Raises:
            OutpaceError: the text has another number of marks, or the processor rejects an image.
        """
        marks = text.count(self.mark)
        if marks != len(images):
            raise OutpaceError(
                f"there are {len(images)} images, but {marks} places for them ({self.mark!r}) in the prompt; "
                f"write no {self.mark!r} in texts"
            )
        try:
            found = self.processor(
                text=[text], images=list(images), add_special_tokens=False, return_tensors="pt"
            )
        except Exception as error:  # a processor may raise anything
            raise OutpaceError(f"the images cannot be read: {first_line(error)}") from error
        return found["input_ids"][0].tolist(), dict(found)


def images_of(source: str, target: TargetModel, tokenizer: Any, trust_remote_code: bool) -> ImageProcessor:
    """The processor of a loaded model, whose template the tokenizer takes; an image of noise tests the model.

    Raises:
        OutpaceError: the model takes no images here; the message gives the reason.
    """
    if not isinstance(target, MultimodalTarget):
        raise OutpaceError("it is a model of text")
    need("images", "reading images")
    from PIL import Image

    try:
        processor = transformers.AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers, the hub and a processor's own code may raise anything
        raise OutpaceError(f"its processor cannot be loaded: {first_line(error)}") from error
    mark = getattr(processor, "image_token", None)
    if not isinstance(mark, str) or not mark:
        raise OutpaceError("its processor names no token of images")
    if processor.chat_template:
        tokenizer.chat_template = processor.chat_template
    found = ImageProcessor(processor, mark)
    noise = np.random.default_rng(0).integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)
    _, inputs = found.prompt(mark, [Image.fromarray(noise)])
    target.encode(inputs)
    return found

"""Images of requests: taken from data URLs, decoded in a worker process, and put into the prompt's source."""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outpace.core import OutpaceError, first_line
from outpace.loading import Loaded
from outpace.serve.dialogue import Dialogue, as_parts
from outpace.serve.errors import NotStarted, Refused
from outpace.serve.pool import JobLimit, WorkerPool
from outpace.serve.totals import CLIENT, Turns

_log = logging.getLogger("outpace.serve")
MOST = 32  # images of a request
PIXELS = 2**23  # of an image
ALL_PIXELS = 2**25  # of the images of a request
_SIDE = 64  # pixels of the image that is read first
_TEXT = 2**20  # characters of a conversation with images
_MEMORY = 2**29  # bytes of a process


class Images:
    """Reader of images of requests.

    Two requests at a time have decoded images, and one of another client; each a limited number of pixels.

    Args:
        name: the model's name in errors.
        seconds: maximum time to decode an image.
        turns: places for jobs of processes.
    """

    def __init__(self, model: Loaded, dialogue: Dialogue, name: str, seconds: float, turns: Turns) -> None:
        self._model, self._dialogue, self._name = model, dialogue, name
        self.pool = WorkerPool(
            "images", JobLimit(seconds, _MEMORY), turns, "reading an image", "messages", kept=1
        )
        self._room = Turns(2)
        self._thread = ThreadPoolExecutor(1, "outpace-images")

    def check(self, turns: Seq[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Turns as the template takes them, with places of images, and the images in their order, in base64.

        Raises:
            Refused: the model takes no images, or there are too many or too large ones.
        """
        found, images = list[dict[str, Any]](), list[str]()
        for turn in turns:
            if isinstance(turn["content"], list):
                images += [part["image"] for part in turn["content"] if part["type"] == "image"]
                parts = [{k: v for k, v in part.items() if k != "image"} for part in turn["content"]]
                turn = {**turn, "content": parts}
            found.append(dict(turn))
        if images and not self.taken:
            why = (
                self._model.no_images if self._model.images is None else "its template has no place for them"
            )
            raise Refused(400, f"{self._name} takes text alone, no images: {why}", "messages")
        if len(images) > MOST:
            raise Refused(400, f"there are {len(images)} images; the maximum is {MOST}", "messages")
        return as_parts(found) if self._dialogue.parted else found, images

    @property
    def taken(self) -> bool:
        """True if the model takes images, and its template has a place for them."""
        return self._model.images is not None and self._dialogue.images

    def warm(self) -> None:
        """Read an image, with which a model is tested, so that no request waits for it."""
        reader = self._model.images
        if self.taken and reader is not None:
            from PIL import Image

            try:
                _, source = reader.prompt(reader.mark, [Image.new("RGB", (_SIDE, _SIDE))])
                self._model.target.encode(source)
            except OutpaceError as error:
                _log.warning("images may be refused: %s", first_line(error))

    async def prompt(self, text: str, images: Seq[str]) -> tuple[list[int], Mapping[str, Any]]:
        """Token ids of a rendered conversation with images, and the source of its request.

        Raises:
            Refused: an image cannot be read, or has too many pixels. OutpaceError: as ``Images.prompt`` of
            the model.
        """
        reader = self._model.images
        assert reader is not None  # as check() has seen
        if len(text) > _TEXT:
            message = f"a conversation with images has at most {_TEXT} characters, and this {len(text)}"
            raise Refused(400, f"{message}; shorten it", "messages")
        async with self._room.place(CLIENT.get()):
            decoded, left = list[Any](), ALL_PIXELS
            for image in images:
                decoded.append(await self._decoded(image, min(left, PIXELS)))
                left -= decoded[-1].width * decoded[-1].height
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, reader.prompt, text, decoded)

    async def _decoded(self, image: str, most: int) -> Any:
        """An image of Pillow, of at most this many pixels."""
        from PIL import Image

        try:
            found = await self.pool.run(json.dumps({"image": image, "most": most}).encode())
        except NotStarted as error:
            raise Refused(503, f"images cannot be read now: {error}", code="overloaded") from error
        size = found["width"], found["height"]
        return await asyncio.to_thread(lambda: Image.frombytes("RGB", size, b64decode(found["pixels"])))

    async def close(self) -> None:
        await self.pool.close()
        self._thread.shutdown(wait=False)

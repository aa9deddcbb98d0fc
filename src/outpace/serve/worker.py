"""A process that works on clients' texts: one job after another, each within its share of memory and time.

What a worker reads and writes are pieces of bytes after their length. The first piece is its options, the
second what its kind needs; then each piece is a job in JSON, answered by ``{"begun": true}`` once it is read,
and by ``{"found": ...}`` or ``{"refused": MESSAGE}``. A job past its share ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import pickle
import struct
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from outpace.core import OutpaceError, first_line
from outpace.reading import render, token_ids, unmarked_ids

HEAD = struct.Struct("<Q")
IMAGE_FORMATS = "PNG", "JPEG", "WEBP", "GIF"
_NICE = 10  # gives a worker a tenth of a core that the engine wants too
_LONG = 2**20  # bytes of a job after which freed memory is returned
Job = Callable[[dict[str, Any]], Any]


def main() -> None:
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    os.nice(_NICE)
    options = json.loads(_read(jobs) or b"{}")
    work = KINDS[options["kind"]](_read(jobs) or b"")
    _limit_memory(options["memory"])
    _write(answers, {"found": None})
    while (job := _read(jobs)) is not None:
        _write(answers, {"begun": True})
        _limit_time(options["seconds"])
        _write(answers, _answer(work, json.loads(job)))
        if len(job) > _LONG:
            del job
            return_memory()


def return_memory() -> None:
    """Return freed memory to the system, which glibc keeps otherwise."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _answer(work: Job, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"found": work(job)}
    except MemoryError:
        os._exit(1)
    except OutpaceError as error:
        return {"refused": str(error)}
    except Exception as error:  # whatever a client's text raises
        return {"refused": f"{type(error).__name__}: {first_line(error)}"}


def _read(file: BinaryIO) -> bytes | None:
    """The next piece; None at the end."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    piece = file.read(size)
    return piece if len(piece) == size else None


def _write(file: BinaryIO, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    file.write(HEAD.pack(len(data)) + data)
    file.flush()


def _limit_memory(more: int) -> None:
    """Limit the process to its present memory and this many bytes; on Linux alone."""
    try:
        import resource

        statm = Path("/proc/self/statm").read_text("ascii")
    except (ModuleNotFoundError, FileNotFoundError):
        return
    held = int(statm.split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + more, held + more))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float) -> None:
    """End the process once a job has taken this much processor time, even if its parent is gone."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, most))


def _texts(pickled: bytes) -> Job:
    """Conversations and texts as token ids; ``pickled`` is the parent's tokenizer."""
    tokenizer = pickle.loads(pickled)

    return lambda job: read_job(tokenizer, job)


def read_job(tokenizer: Any, job: dict[str, Any]) -> Any:
    """A text, or a conversation in the template, as token ids; or its length, if that is too much."""
    if job.get("text") is None:
        text = render(tokenizer, job["name"], with_arguments(job["messages"]), **job["options"])
        if job.get("text_alone") and (job["most"] is None or len(text) <= job["most"]):
            return text
        job = {"text": text, "special": False, "most": job["most"]}
    if job["most"] is not None and len(job["text"]) > job["most"]:
        return len(job["text"])
    return read_text(tokenizer, job)


def read_text(tokenizer: Any, job: dict[str, Any]) -> list[int]:
    """A text as token ids; one with ``marks`` becomes none of them."""
    if "marks" in job:
        return unmarked_ids(tokenizer, job["text"], job["marks"], job["begins"])
    return token_ids(tokenizer, job["text"], job["special"])


def with_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the arguments of their calls as objects, which templates expect; other text stays text.

    A text is made into many times its size, so a long conversation's are read where it has limits.
    """
    return [
        message
        if "tool_calls" not in message
        else {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        for message in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        found = from_json(function["arguments"], allow_inf_nan=False)  # which has a limit of nesting
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": found}}


def _schemas(_: bytes) -> Job:
    """JSON schemas and grammars, compiled for single bytes: the time does not depend on the vocabulary.

    Those in other notations are answered in Lark.
    """
    from outpace.grammars.compiling import bytes_alone, compiled
    from outpace.grammars.notations import Free
    from outpace.serve.schemas import unforced

    tokenizer = bytes_alone()

    def check(job: dict[str, Any]) -> Any:
        if "notation" in job:
            text = Free(**job).lark()
            compiled(tokenizer, text)
            return text
        try:
            compiled(tokenizer, job["schema"])
        except OutpaceError as error:
            raise OutpaceError(unforced(job["functions"]) or str(error)) from error
        return None

    return check


def _images(_: bytes) -> Job:
    """Images in base64 as pixels, red, green and blue, turned as their cameras say; the first of several."""
    from PIL import Image, ImageOps

    Image.init()

    def read(job: dict[str, Any]) -> dict[str, Any]:
        try:
            data = io.BytesIO(b64decode(job["image"], validate=True))
            with Image.open(data, formats=IMAGE_FORMATS) as image:
                size = image.width * image.height
                if size <= job["most"]:
                    plain = ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # of any decoder
            raise OutpaceError(
                f"an image cannot be read: {first_line(error)}; send {', '.join(IMAGE_FORMATS)} in base64"
            ) from error
        if size > job["most"]:
            raise OutpaceError(
                f"an image has {image.width} x {image.height} pixels, more than the {job['most']} that are "
                "left for it; make it smaller"
            )
        pixels = b64encode(plain.tobytes()).decode()
        return {"width": plain.width, "height": plain.height, "pixels": pixels}

    return read


KINDS: dict[str, Callable[[bytes], Job]] = {"texts": _texts, "schemas": _schemas, "images": _images}

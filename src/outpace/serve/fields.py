"""Fields that the bodies of several APIs share, as pydantic types. Unknown fields are refused, never ignored.

Every list and mapping has a bound, and a list ends at its first wrong element: a body of a few megabytes
would otherwise be as many errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, from_json, to_json

from outpace.serve.errors import Refused

TURNS = 4096  # messages of a conversation
PARTS = 1024  # parts of a message
_TOKENS = 2**20  # tokens of a text
_PAIRS = 4096  # of a mapping
_NESTED = 2**16  # objects and lists of a body


def _whole(value: Any) -> Any:
    """Convert a float without a fraction to an integer, since JSON has one type of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(values: Any) -> Any:
    """Convert the elements of a long list like ``_whole``; one of integers alone takes no call for each."""
    mixed = isinstance(values, list) and float in set(map(type, values))
    return [_whole(value) for value in values] if mixed else values


def _no_media(content: Any) -> Any:
    """Refuse parts of a message that are neither text nor images, by the names of their types."""
    parts = islice(content, PARTS) if isinstance(content, list) else ()
    for kind in (part.get("type") for part in parts if isinstance(part, dict)):
        if isinstance(kind, str) and kind.startswith(_NO_MEDIA):
            told = {"kind": repr(kind)}
            raise PydanticCustomError("no_media", "this server takes text and images here, not {kind}", told)
    return content


def off(remedy: str) -> AfterValidator:
    """A check that refuses what a client would rely on and this server does not do; false and null pass."""

    def check(given: Any) -> Any:
        if given:
            raise PydanticCustomError("not_done", remedy)
        return given

    return AfterValidator(check)


_IMAGE_BYTES = 2**23  # of a compressed image
WITH_IMAGES = "images are taken in messages of the user and in results of tools"
_URL = re.compile(r"data:image/[a-z+.-]{1,20};base64,", re.IGNORECASE)
_BILLING = re.compile(r"\Ax-anthropic-billing-header:(?: *[\w.-]+=[^;\n]*(?:;|(?=\n|\Z)))+ *(?:\n|\Z)")
INERT = Field(json_schema_extra={"x-effect": "none"})  # a field that has no effect on the text
_NO_MEDIA = ("input_audio", "audio", "video", "file", "input_file", "document")
TextAndImages = BeforeValidator(_no_media)
Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Int, Field(ge=0, le=2**31)]
Most = Annotated[Int, Field(ge=1, le=2**31)]
Thoughts = Annotated[Int, Field(ge=-1, le=2**31)]  # tokens of reasoning at most; -1 for any number
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=64, fail_fast=True)]
Seed = Annotated[Int, Field(ge=-(2**63), lt=2**64)]
Token = Annotated[int, Field(ge=0, le=2**31)]
Tokens = Annotated[list[Token], Field(max_length=_TOKENS, fail_fast=True), BeforeValidator(_all_whole)]
EndTokens = Annotated[list[Token], Field(max_length=1000, fail_fast=True), BeforeValidator(_all_whole)]
Anything = Annotated[list[Any], Field(max_length=_TOKENS, fail_fast=True)]
Object = Annotated[dict[str, Any], Field(max_length=_PAIRS)]
Bias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_PAIRS)]


class Wire(BaseModel):
    """A JSON object; unknown fields are refused, types are not converted, and a field of null is absent."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if isinstance(given, dict) and None in given.values():
            return {name: value for name, value in given.items() if value is not None}
        return given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema, in which each field that may be absent may be null."""
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        for name, field in own.get("properties", {}).items():
            kinds = field.get("anyOf", [field])
            if not {"type", "anyOf", "$ref", "enum", "const"} & field.keys():  # anything
                continue
            if name not in own.get("required", ()) and {"type": "null"} not in kinds:
                told = {key: field[key] for key in ("title", "description", "default") if key in field}
                bare = {key: value for key, value in field.items() if key not in told}
                kinds = bare["anyOf"] if bare.keys() == {"anyOf"} else [bare]
                own["properties"][name] = {"anyOf": [*kinds, {"type": "null"}], **told}
        return schema


def check_size(value: Any) -> None:
    """Refuse objects of very many fields, each of which may be an error, and very many objects and lists.

    Raises:
        ValueError: there is one.
    """
    left, count = [value], 0
    while left:
        one = left.pop()
        count += 1
        if count > _NESTED:
            raise ValueError(f"the body has more than {_NESTED} objects and lists")
        if isinstance(one, dict) and len(one) > _PAIRS:
            raise ValueError(f"an object has {len(one)} fields; the maximum is {_PAIRS}")
        if isinstance(one, dict | list):
            inner = one.values() if isinstance(one, dict) else one
            left.extend(value for value in inner if isinstance(value, dict | list))


class ModelName(Wire):
    """``POST /models/load`` and ``/models/unload``."""

    model: str


class Error(Wire):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class Failure(Wire):
    """The body of an error response."""

    error: Error


def _whole_object(arguments: str) -> str:
    """The arguments of a call in a conversation as a JSON object.

    None at all are an empty one, and what an answer's limit has cut off is left out, since clients send back
    what they got.
    """
    if not arguments.strip():
        return "{}"
    if arguments.count("[") + arguments.count("{") > _NESTED:
        raise PydanticCustomError("too_nested", f"more than {_NESTED} objects and lists")
    try:
        found = from_json(arguments, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        if not str(error).startswith("EOF"):
            why, told = "the arguments of a call must be JSON: {error}", {"error": str(error)}
            raise PydanticCustomError("no_json", why, told) from None
        found = from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")
        arguments = to_json(found).decode()
    if found is None:
        return "{}"
    if not isinstance(found, dict):
        raise PydanticCustomError("no_object", "the arguments of a call must be a JSON object")
    return arguments


def _input_object(given: Any) -> Any:
    return from_json(_whole_object(given)) if isinstance(given, str) else given


def _arguments_text(given: Any) -> Any:
    return to_json(given).decode() if isinstance(given, dict) else given


Arguments = Annotated[
    str,
    BeforeValidator(_arguments_text),
    AfterValidator(_whole_object),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
# The same, of an API that has them as an object.
Input = Annotated[Object, BeforeValidator(_input_object)]


class StreamOptions(Wire):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, off("not done here; leave it out, or give false")] = False


class Speculate(Wire):
    """The request's drafter, maximum draft size, and whether others may draft from its output."""

    drafter: str | None = None
    num_speculative_tokens: Count | None = None
    memory: Literal["off"] | None = None


class Sampled(Wire):
    """Fields of all requests for text."""

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31)] | None = None
    # outpace's own
    speculation: str | bool | Speculate | None = None
    speculation_metrics: bool = False


class Labelled(Sampled):
    """Fields of OpenAI's requests that have no effect on the text."""

    user: Annotated[str | None, INERT] = None
    store: Annotated[bool | None, off("nothing is stored here; leave store out, or give false"), INERT] = None
    metadata: Annotated[Object | None, INERT] = None
    service_tier: Annotated[str | None, INERT] = None
    safety_identifier: Annotated[str | None, INERT] = None
    prompt_cache_key: Annotated[str | None, INERT] = None
    prompt_cache_retention: Annotated[str | None, INERT] = None


class OpenAI(Labelled):
    """Common fields of chat and completions."""

    n: Annotated[Int, Field(ge=1, le=128)] = 1
    max_tokens: Count | None = None
    stop: Stop | Stops | None = None
    seed: Seed | None = None
    logit_bias: Bias | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream_options: StreamOptions | None = None
    # vLLM's
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool = False
    min_tokens: Count = 0
    stop_token_ids: EndTokens | None = None
    return_token_ids: bool = False
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    # outpace's own
    trace: bool = False


class TextPart(Wire):
    type: Literal["text", "input_text", "output_text"]
    text: str
    # Returned by clients as received, or for a cache, which is automatic here
    annotations: Annotated[Anything | None, INERT] = None
    logprobs: Annotated[Anything | None, INERT] = None
    citations: Annotated[Anything | None, INERT] = None
    parsed: Annotated[Any, INERT] = None
    parsed_output: Annotated[Any, INERT] = None
    cache_control: Annotated[Object | None, INERT] = None


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


def from_url(url: str, param: str) -> str:
    """The image in a data URL, in base64.

    Raises:
        Refused: it is another URL, or too long.
    """
    head = _URL.match(url)
    if head is None:
        message = "images are taken as data URLs (data:image/png;base64,...); this server fetches none"
        raise Refused(400, message, param)
    return checked_image(url[head.end() :], param)


def checked_image(image: str, param: str) -> str:
    """An image in base64.

    Raises:
        Refused: it is too long, or empty.
    """
    if not image:
        raise Refused(400, "an image is empty", param)
    if len(image) // 4 * 3 > _IMAGE_BYTES:
        raise Refused(400, f"an image has more than {_IMAGE_BYTES} bytes; make it smaller", param)
    return image


class ImageUrl(Wire):
    url: str
    detail: Annotated[str | None, INERT] = None


class ImagePart(Wire):
    """An image in a chat."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def base64(self) -> str:
        """The image.

        Raises:
            Refused: it has another URL than a data URL, or is too long.
        """
        return from_url(self.image_url.url, "messages")


class InputImage(Wire):
    """An image in a message of ``/v1/responses``."""

    type: Literal["input_image"]
    image_url: str
    detail: Annotated[str | None, INERT] = None
    file_id: Annotated[str | None, off("nothing is stored here; send the image in image_url")] = None

    def base64(self) -> str:
        return from_url(self.image_url, "input")


TextParts = Annotated[list[TextPart], Field(max_length=PARTS, fail_fast=True)]
ChatParts = Annotated[
    list[Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]],
    Field(max_length=PARTS, fail_fast=True),
]
InputParts = Annotated[
    list[Annotated[TextPart | RefusalPart | InputImage, Field(discriminator="type")]],
    Field(max_length=PARTS, fail_fast=True),
]


class HasImage(Protocol):
    """A part of a message that is an image."""

    def base64(self) -> str: ...


def content_of(
    content: str | Seq[TextPart | RefusalPart | HasImage] | None, role: str
) -> str | list[dict[str, str]]:
    """A message's content as one text or, with images, as the parts of ``Prompts.conversation``.

    Raises:
        Refused: an image is neither a user's nor in a result, or as ``ImagePart.base64``.
    """
    told = _for_the_model if role in ("system", "developer") else str
    if content is None or isinstance(content, str):
        return told(content or "")
    parts = list[dict[str, str]]()
    for part in content:
        if not isinstance(part, TextPart | RefusalPart):
            if role not in ("user", "tool"):
                raise Refused(400, f"{WITH_IMAGES}, not of {role}", "messages")
            parts.append({"type": "image", "image": part.base64()})
        else:
            text = part.text if isinstance(part, TextPart) else part.refusal
            parts.append({"type": "text", "text": told(text)})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _for_the_model(text: str) -> str:
    """A text of the system without the line of a client's billing at its head.

    Claude Code sends one, of pairs that change from request to request. It is for Anthropic's servers, which
    take it out; a model that saw it would read no earlier prompt from the prefix cache.
    """
    return _BILLING.sub("", text, count=1)


def plain_text(content: str | Seq[TextPart | RefusalPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)

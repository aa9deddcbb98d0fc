"""Bodies of requests, as pydantic types. Unknown fields are refused, never ignored.

Every list and mapping has a bound, and a list ends at its first wrong element: a body of a few megabytes
would otherwise be as many errors.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)
from pydantic_core import PydanticCustomError

_TURNS = 4096  # messages of a conversation
_PARTS = 1024  # parts of a message
_TEXTS = 1024  # texts of a completion
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


def _text_alone(content: Any) -> Any:
    """Refuse parts of a message that are not text by their name."""
    parts = islice(content, _PARTS) if isinstance(content, list) else ()
    for kind in (part.get("type") for part in parts if isinstance(part, dict)):
        if isinstance(kind, str) and kind.startswith(_NOT_TEXT):
            raise PydanticCustomError("not_text", "this server takes text, not {kind}", {"kind": repr(kind)})
    return content


def _off(remedy: str) -> AfterValidator:
    """A check that refuses true, for what a client would rely on and this server does not do."""

    def check(given: bool | None) -> bool | None:
        if given:
            raise PydanticCustomError("not_done", remedy)
        return given

    return AfterValidator(check)


_NOT_TEXT = ("image", "input_image", "input_audio", "audio", "video", "file", "input_file", "document")
TextOnly = BeforeValidator(_text_alone)
Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Int, Field(ge=0, le=2**31)]
Most = Annotated[Int, Field(ge=1, le=2**31)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=64, fail_fast=True)]
Token = Annotated[int, Field(ge=0, le=2**31)]
Tokens = Annotated[list[Token], Field(max_length=_TOKENS, fail_fast=True), BeforeValidator(_all_whole)]
EndTokens = Annotated[list[Token], Field(max_length=1000, fail_fast=True), BeforeValidator(_all_whole)]
Anything = Annotated[list[Any], Field(max_length=_TOKENS, fail_fast=True)]
Object = Annotated[dict[str, Any], Field(max_length=_PAIRS)]
Bias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_PAIRS)]


def _kind_of_prompt(prompt: Any) -> str:
    """The kind of a prompt by its first element, so that one kind alone is tried."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(max_length=_TEXTS, fail_fast=True), Tag("texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[list[Tokens], Field(max_length=_TEXTS, fail_fast=True), Tag("lists")],
    Discriminator(_kind_of_prompt),
]


class Wire(BaseModel):
    """A JSON object; unknown fields are refused, and types are not converted."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


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


class Error(Wire):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class Failure(Wire):
    """The body of an error response."""

    error: Error


class AnthropicError(Wire):
    type: str
    message: str


class AnthropicFailure(Wire):
    """The body of an error response in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicError


class StreamOptions(Wire):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, _off("not done here; leave it out, or give false")] = False


class Speculate(Wire):
    """The request's drafter, maximum draft size, and whether others may draft from its output."""

    drafter: str | None = None
    num_speculative_tokens: Count | None = None
    memory: Literal["off"] | None = None


class Sampled(Wire):
    """Fields of all requests for text."""

    model: str | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31)] | None = None
    # outpace's own
    speculation: str | bool | Speculate | None = None
    speculation_metrics: bool = False


class Labelled(Sampled):
    """Fields of OpenAI's requests that have no effect on the text."""

    user: str | None = None
    store: Annotated[bool | None, _off("nothing is stored here; leave store out, or give false")] = None
    metadata: Object | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class OpenAI(Labelled):
    """Common fields of chat and completions."""

    n: Annotated[Int, Field(ge=1, le=128)] | None = 1
    max_tokens: Count | None = None
    stop: Stop | Stops | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**64)] | None = None
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
    return_token_ids: bool | None = False
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    # outpace's own
    trace: bool = False
    prompt_cache_retention: str | None = None  # without an effect on the text


class Completions(OpenAI):
    """``POST /v1/completions``."""

    prompt: Prompt | None = None
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    best_of: Annotated[Int, Field(ge=1)] | None = None
    suffix: str | None = None


class TextPart(Wire):
    type: Literal["text", "input_text", "output_text"]
    text: str
    # Returned by clients as received, or for a cache, which is automatic here
    annotations: Anything | None = None
    logprobs: Anything | None = None
    cache_control: Object | None = None


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


TextParts = Annotated[list[TextPart], Field(max_length=_PARTS, fail_fast=True)]
Parts = Annotated[
    list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
    Field(max_length=_PARTS, fail_fast=True),
]


class FunctionCall(Wire):
    name: str
    arguments: str


class ToolCall(Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | Parts | None, TextOnly] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=_PARTS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Anything | None = None
    audio: None = None
    function_call: None = None


Conversation = Annotated[list[Message], Field(min_length=1, max_length=_TURNS, fail_fast=True)]


class Function(Wire):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class Named(Wire):
    name: str


class NamedTool(Wire):
    type: Literal["function"]
    function: Named


class JsonSchema(Wire):
    name: str
    description: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None


class Format(Wire):
    """A ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Wire):
    type: Literal["content"]
    content: str | TextParts


class Chat(OpenAI):
    """``POST /v1/chat/completions``."""

    messages: Conversation
    max_tokens: Most | None = None
    max_completion_tokens: Most | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: Object | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=8, fail_fast=True)] | None = None
    verbosity: Literal["medium"] | None = None


class Tokenize(Wire):
    """``POST /tokenize``: a text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    add_special_tokens: bool | None = None  # by default to a prompt, since templates contain them
    add_generation_prompt: bool | None = None  # of messages, by default
    return_token_strs: bool | None = False


class Detokenize(Wire):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Tokens


class AnthropicTurn(Wire):
    role: Literal["user", "assistant"]
    content: Annotated[str | TextParts, TextOnly]


AnthropicTurns = Annotated[list[AnthropicTurn], Field(min_length=1, max_length=_TURNS, fail_fast=True)]


class CountTokens(Wire):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: AnthropicTurns
    system: str | TextParts | None = None


class Messages(Sampled):
    """``POST /v1/messages`` of Anthropic's API."""

    messages: AnthropicTurns
    system: str | TextParts | None = None
    max_tokens: Most
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Stops | None = None
    metadata: Object | None = None
    service_tier: str | None = None


class ResponseMessage(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | Parts, TextOnly]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseText(Wire):
    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None


class Responses(Labelled):
    """``POST /v1/responses``; nothing is stored."""

    input: str | Annotated[list[ResponseMessage], Field(min_length=1, max_length=_TURNS, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Most | None = None
    text: ResponseText | None = None
    truncation: Literal["disabled"] | None = None

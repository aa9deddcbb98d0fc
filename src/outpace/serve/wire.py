"""Bodies of requests, as pydantic types. Unknown fields are refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError


def _whole(value: Any) -> Any:
    """Convert a float without a fraction to an integer, since JSON has one type of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text_alone(content: Any) -> Any:
    """Refuse parts of a message that are not text by their name."""
    kinds = (
        [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    )
    for kind in kinds:
        if isinstance(kind, str) and kind.startswith(_NOT_TEXT):
            raise PydanticCustomError("not_text", "this server takes text, not {kind}", {"kind": repr(kind)})
    return content


_NOT_TEXT = ("image", "input_image", "input_audio", "audio", "video", "file", "input_file", "document")
TextOnly = BeforeValidator(_text_alone)
Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Int, Field(ge=0, le=2**31)]
Most = Annotated[Int, Field(ge=1, le=2**31)]
Token = Annotated[Int, Field(ge=0, le=2**31)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class Wire(BaseModel):
    """A JSON object; unknown fields are refused, and types are not converted."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


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
    include_obfuscation: bool = False


class Speculate(Wire):
    """The request's drafter, maximum draft size, and whether others may draft from its output."""

    drafter: str | None = None
    num_speculative_tokens: Count | None = None
    memory: Literal["off"] | None = None


class Sampled(Wire):
    """Fields of all requests for text."""

    model: str | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31)] | None = None
    # outpace's own
    speculation: str | bool | Speculate | None = None
    speculation_metrics: bool = False


class Labelled(Sampled):
    """Fields of OpenAI's requests that have no effect on the text."""

    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class OpenAI(Labelled):
    """Common fields of chat and completions."""

    n: Annotated[Int, Field(ge=1, le=128)] | None = 1
    max_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**64)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream_options: StreamOptions | None = None
    # vLLM's
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool = False
    min_tokens: Count = 0
    stop_token_ids: Annotated[list[Token], Field(max_length=1000)] | None = None
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    # outpace's own
    trace: bool = False
    prompt_cache_retention: str | None = None  # without an effect on the text


class Completions(OpenAI):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[Token] | list[list[Token]] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    best_of: Annotated[Int, Field(ge=1)] | None = None
    suffix: str | None = None


class TextPart(Wire):
    type: Literal["text", "input_text", "output_text"]
    text: str
    # Returned by clients as received, or for a cache, which is automatic here
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    cache_control: dict[str, Any] | None = None


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


class FunctionCall(Wire):
    name: str
    arguments: str


class ToolCall(Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[TextPart | RefusalPart] | None, TextOnly] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(Wire):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
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
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class Format(Wire):
    """A ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Wire):
    type: Literal["content"]
    content: str | list[TextPart]


class Chat(OpenAI):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Most | None = None
    max_completion_tokens: Most | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None


class Tokenize(Wire):
    """``POST /tokenize``: a text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class Detokenize(Wire):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[Token]


class AnthropicTurn(Wire):
    role: Literal["user", "assistant"]
    content: Annotated[str | list[TextPart], TextOnly]


class CountTokens(Wire):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[AnthropicTurn], Field(min_length=1)]
    system: str | list[TextPart] | None = None


class Messages(Sampled):
    """``POST /v1/messages`` of Anthropic's API."""

    messages: Annotated[list[AnthropicTurn], Field(min_length=1)]
    system: str | list[TextPart] | None = None
    max_tokens: Most
    stop_sequences: Annotated[list[Stop], Field(max_length=64)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class ResponseMessage(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart | RefusalPart], TextOnly]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseText(Wire):
    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None


class Responses(Labelled):
    """``POST /v1/responses``; nothing is stored."""

    input: str | Annotated[list[ResponseMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Most | None = None
    text: ResponseText | None = None
    truncation: Literal["disabled"] | None = None

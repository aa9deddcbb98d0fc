"""The body of ``POST /v1/messages``: its types, and its conversation and tools for templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag

from outpace.serve.errors import Refused
from outpace.serve.fields import (
    INERT,
    PARTS,
    TURNS,
    WITH_IMAGES,
    Anything,
    Input,
    Most,
    Object,
    Sampled,
    Stops,
    TextAndImages,
    TextPart,
    TextParts,
    Wire,
    checked_image,
    content_of,
    off,
)
from outpace.serve.service import Service
from outpace.serve.tools import Toolbox, check_names, chosen

_NAME = StringConstraints(min_length=1, max_length=256)
_NO_LINK = "images are taken as sources of the type base64; this server fetches none"


class AnthropicError(Wire):
    type: str
    message: str


class AnthropicFailure(Wire):
    """The body of an error response in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicError


class ThinkingPart(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, INERT] = None


class RedactedPart(Wire):
    type: Literal["redacted_thinking"]
    data: Annotated[str, INERT]


class ToolUse(Wire):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[Input, Field(default_factory=dict)]
    cache_control: Annotated[Object | None, INERT] = None
    caller: Annotated[Object | None, INERT] = None
    toolset_name: Annotated[str | None, INERT] = None


class ImageSource(Wire):
    type: Literal["base64", "url", "file"]
    media_type: Annotated[str | None, INERT] = None
    data: str | None = None
    url: Annotated[str | None, off(_NO_LINK)] = None
    file_id: Annotated[str | None, off(_NO_LINK)] = None


class ImageBlock(Wire):
    """An image of the user, or in a result."""

    type: Literal["image"]
    source: ImageSource
    cache_control: Annotated[Object | None, INERT] = None

    def base64(self) -> str:
        """The image.

        Raises:
            Refused: it is a link, or too long.
        """
        if self.source.type != "base64":
            raise Refused(400, _NO_LINK, "messages")
        return checked_image(self.source.data or "", "messages")


class ToolResult(Wire):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        str
        | Annotated[
            list[Annotated[TextPart | ImageBlock, Field(discriminator="type")]],
            Field(max_length=PARTS, fail_fast=True),
        ]
        | None,
        TextAndImages,
    ] = None
    is_error: bool | None = None
    cache_control: Annotated[Object | None, INERT] = None


_Part = Annotated[
    TextPart | ImageBlock | ThinkingPart | RedactedPart | ToolUse | ToolResult, Field(discriminator="type")
]
_Parts = Annotated[list[_Part], Field(max_length=PARTS, fail_fast=True)]


class AnthropicTurn(Wire):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | _Parts, TextAndImages]


AnthropicTurns = Annotated[list[AnthropicTurn], Field(min_length=1, max_length=TURNS, fail_fast=True)]


class AnthropicTool(Wire):
    """A function that the client runs."""

    name: Annotated[str, _NAME]
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Object
    cache_control: Annotated[Object | None, INERT] = None
    strict: Annotated[bool | None, INERT] = None
    eager_input_streaming: Annotated[bool | None, INERT] = None
    defer_loading: Annotated[bool | None, INERT] = None
    allowed_callers: Annotated[Anything | None, INERT] = None
    input_examples: Annotated[Anything | None, INERT] = None


class AnthropicHosted(Wire):
    """A tool of Anthropic's own: the prompt does not show it."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-z0-9_-]+$")]


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "own" if kind in (None, "custom") else "hosted"


AnthropicTools = Annotated[
    list[
        Annotated[
            Annotated[AnthropicTool, Tag("own")] | Annotated[AnthropicHosted, Tag("hosted")],
            Discriminator(_kind_of_tool),
        ]
    ],
    Field(max_length=128, fail_fast=True),
]


class AnthropicChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: Most | None = None
    display: Annotated[str | None, INERT] = None


class OutputFormat(Wire):
    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(Wire):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[Object | None, INERT] = None


class Prompted(Wire):
    """Fields of which a prompt is made."""

    model: str | None = None
    messages: AnthropicTurns
    system: str | TextParts | None = None
    tools: AnthropicTools | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: Annotated[Object | None, INERT] = None
    cache_control: Annotated[Object | None, INERT] = None


class CountTokens(Prompted):
    """``POST /v1/messages/count_tokens``."""


class Messages(Prompted, Sampled):
    """``POST /v1/messages`` of Anthropic's API."""

    max_tokens: Most
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Stops | None = None
    metadata: Annotated[Object | None, INERT] = None
    service_tier: Annotated[str | None, INERT] = None
    inference_geo: Annotated[str | None, INERT] = None
    speed: Annotated[Literal["standard", "fast"] | None, INERT] = None


# -- for templates -----------------------------------------------------------------------------------------


def toolbox(body: Prompted) -> Toolbox:
    """The tools of a body.

    Raises:
        Refused: one that must be called is not among them, or two have one name.
    """
    tools, left_out = list[dict[str, Any]](), list[str]()
    for tool in body.tools or ():
        if isinstance(tool, AnthropicHosted):
            left_out.append(tool.type)
            continue
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        given = {key: value for key, value in function.items() if value is not None}
        tools.append({"type": "function", "function": given})
    check_names(tools)
    asked = body.tool_choice or AnthropicChoice(type="auto")
    if asked.type == "tool" and asked.name is None:
        raise Refused(400, "tool_choice of type tool needs a name", "tool_choice")
    how = "required" if asked.type == "any" else None if asked.type == "tool" else asked.type
    choice = chosen(how, asked.name if asked.type == "tool" else None, tools)
    return Toolbox(tools, choice, asked.disable_parallel_tool_use is not True, left_out)


def schema_of(body: Prompted) -> dict[str, Any] | None:
    """The schema of the answer; None if it has none."""
    config = body.output_config
    return config.format.schema_ if config is not None and config.format is not None else None


def conversation(
    service: Service, body: Prompted, box: Toolbox
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversation in the format of chat templates, and their options; the last turn may be begun."""
    names = dict[str, str]()
    turns = [] if body.system is None else _turns_of_system(body.system)
    for message in body.messages:
        turns += _turns(message, names)
    dialogue = service.dialogue
    turns, options = dialogue.prepared(dialogue.spread(turns), box.shown)
    effort = body.output_config.effort if body.output_config is not None else None
    return turns, options | dialogue.variables(thinking_of(body)[0], effort)


def thinking_of(body: Prompted) -> tuple[bool | None, int | None]:
    """Whether reasoning is asked for, and its budget; None for what the client does not say."""
    if body.thinking is None:
        return None, None
    return {"enabled": True, "disabled": False}.get(body.thinking.type), body.thinking.budget_tokens


def _turns_of_system(system: str | Seq[TextPart]) -> list[dict[str, Any]]:
    """The turn of the system; none if its text was for others than the model."""
    text = content_of(system, "system")
    return [{"role": "system", "content": text}] if text or not system else []


_BLOCKS = {  # of a message, by its role
    "user": (TextPart, ImageBlock, ToolResult),
    "assistant": (TextPart, ThinkingPart, RedactedPart, ToolUse),
    "system": (TextPart,),
}


def _turns(message: AnthropicTurn, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The turns that a message is."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": content_of(message.content, message.role)}
        return
    for part in message.content:
        if not isinstance(part, _BLOCKS[message.role]):
            if isinstance(part, ImageBlock):
                raise Refused(400, f"{WITH_IMAGES}, not of {message.role}", "messages")
            why = f"a block of type {part.type} is not taken in a message of the role {message.role}"
            raise Refused(400, why, "messages")
    if message.role == "assistant":
        yield _assistant(message.content, names)
        return
    parts = list[TextPart | ImageBlock]()
    for part in message.content:
        if isinstance(part, TextPart | ImageBlock):
            parts.append(part)
        if not isinstance(part, ToolResult):
            continue
        if parts:
            yield {"role": message.role, "content": _content(parts)}
            parts = []
        said = content_of(part.content, "tool")
        if part.is_error:
            said = f"Error: {said}" if isinstance(said, str) else [{"type": "text", "text": "Error: "}, *said]
        turn = {"role": "tool", "content": said, "tool_call_id": part.tool_use_id}
        yield turn | ({"name": names[part.tool_use_id]} if part.tool_use_id in names else {})
    if parts or not message.content:
        yield {"role": message.role, "content": _content(parts)}


def _content(parts: Seq[TextPart | ImageBlock]) -> str | list[dict[str, str]]:
    """The content of a turn: texts joined by line breaks or, with images, its parts."""
    if not any(isinstance(part, ImageBlock) for part in parts):
        return "\n".join(part.text for part in parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image", "image": part.base64()}
        for part in parts
    ]


def _assistant(parts: Seq[_Part], names: dict[str, str]) -> dict[str, Any]:
    """A turn of the assistant, with its reasoning and its calls."""
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(part.text for part in parts if isinstance(part, TextPart)),
    }
    if thought := "".join(part.thinking for part in parts if isinstance(part, ThinkingPart)):
        turn["reasoning_content"] = thought
    calls = [part for part in parts if isinstance(part, ToolUse)]
    names |= {part.id: part.name for part in calls}
    if calls:
        turn["tool_calls"] = [
            {
                "id": part.id,
                "type": "function",
                "function": {"name": part.name, "arguments": json.dumps(part.input, ensure_ascii=False)},
            }
            for part in calls
        ]
    return turn

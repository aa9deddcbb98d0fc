"""The body of ``POST /v1/responses``: its types, and its conversation and tools for templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from outpace.serve.errors import Refused
from outpace.serve.fields import (
    INERT,
    PARTS,
    TURNS,
    Arguments,
    InputParts,
    Labelled,
    Most,
    Object,
    StreamOptions,
    TextAndImages,
    Thoughts,
    Wire,
    content_of,
    off,
)
from outpace.serve.service import Service
from outpace.serve.tools import Toolbox, allowed, check_names, chosen

_Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_Inert = Annotated[str | None, INERT]
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_STATELESS = "nothing is stored here; leave it out, and send the whole conversation in input"


def _no_logprobs(given: list[str] | None) -> list[str] | None:
    if given and "message.output_text.logprobs" in given:
        raise PydanticCustomError("not_done", "responses have no logprobs here; leave it out, or use chat")
    return given


# -- items -------------------------------------------------------------------------------------------------


class ResponseMessage(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | InputParts, TextAndImages]
    type: Literal["message"] = "message"
    id: _Inert = None
    status: _Inert = None
    phase: _Inert = None


class _Item(Wire):
    id: _Inert = None
    status: _Inert = None


class _CallItem(_Item):
    caller: Annotated[Object | None, INERT] = None


class FunctionCallItem(_CallItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Arguments = "{}"
    parsed_arguments: Annotated[Any, INERT] = None


class CustomCallItem(_CallItem):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OutputItem(_CallItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[str | InputParts, TextAndImages]


class ReasoningText(Wire):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


_Reasonings = Annotated[list[ReasoningText], Field(max_length=PARTS, fail_fast=True)]


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[_Reasonings | None, INERT] = None
    content: _Reasonings | None = None
    encrypted_content: _Inert = None


def _kind_of_item(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[ResponseMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[OutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of_item),
]


# -- tools -------------------------------------------------------------------------------------------------


class FunctionTool(Wire):
    type: Literal["function"]
    name: _Name
    description: str | None = None
    parameters: Object | None = None
    strict: Annotated[bool | None, INERT] = None
    defer_loading: Annotated[bool | None, INERT] = None


class CustomTool(Wire):
    """A function of one text, which the model is not made to write in the tool's format."""

    type: Literal["custom"]
    name: _Name
    description: str | None = None
    format: Object | None = None


class NamespaceTool(Wire):
    """Functions under one name."""

    type: Literal["namespace"]
    name: _Name
    description: Annotated[str | None, INERT] = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(max_length=128, fail_fast=True),
    ]


class HostedTool(Wire):
    """A tool that the server would have to run: the prompt does not show it."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-z0-9_-]+$")]


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind in ("function", "custom", "namespace") else "hosted"


ResponseTools = Annotated[
    list[
        Annotated[
            Annotated[FunctionTool, Tag("function")]
            | Annotated[CustomTool, Tag("custom")]
            | Annotated[NamespaceTool, Tag("namespace")]
            | Annotated[HostedTool, Tag("hosted")],
            Discriminator(_kind_of_tool),
        ]
    ],
    Field(max_length=128, fail_fast=True),
]


class FunctionChoice(Wire):
    type: Literal["function", "custom"]
    name: str


class AllowedChoice(Wire):
    """The tools of which the answer may call one, or must; one that is left out is not among them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionChoice, Tag("function")]
                | Annotated[FunctionChoice, Tag("custom")]
                | Annotated[HostedTool, Tag("hosted")],
                Discriminator(_kind_of_tool),
            ]
        ],
        Field(min_length=1, max_length=128, fail_fast=True),
    ]


# -- the body ----------------------------------------------------------------------------------------------


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: _Inert = None
    description: _Inert = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, INERT] = None


class ResponseText(Wire):
    format: ResponseFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, INERT] = None


class Reasoning(Wire):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    max_tokens: Thoughts | None = None  # of reasoning, as OpenRouter has it
    summary: _Inert = None
    generate_summary: _Inert = None
    context: _Inert = None


class Responses(Labelled):
    """``POST /v1/responses``; nothing is stored."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=TURNS, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Most | None = None
    text: ResponseText | None = None
    tools: ResponseTools | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FunctionChoice | AllowedChoice, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, INERT] = None
    include: Annotated[
        Annotated[
            list[Annotated[str, StringConstraints(max_length=64)]], Field(max_length=16, fail_fast=True)
        ]
        | None,
        AfterValidator(_no_logprobs),
        INERT,
    ] = None
    max_tool_calls: Annotated[Most | None, INERT] = None
    client_metadata: Annotated[Object | None, INERT] = None
    stream_options: Annotated[StreamOptions | None, INERT] = None
    previous_response_id: Annotated[str | None, off(_STATELESS)] = None
    conversation: Annotated[str | Object | None, off(_STATELESS)] = None
    background: Annotated[bool | None, off("not done here; leave it out, or give false")] = None


# -- for templates -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """Where a function of the prompt comes from: its name there, its namespace, and the type of its tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass
class Flat:
    """The tools of a request as functions, by names that contain their namespaces."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, tool: Any, namespace: str | None = None) -> None:
        if isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                self.add(inner, tool.name)
        elif isinstance(tool, HostedTool):
            self.left_out.append(tool.type)
        else:
            name = joined(namespace, tool.name)
            custom = isinstance(tool, CustomTool)
            self.origins[name] = Origin(tool.name, namespace, custom)
            function: dict[str, Any] = {"name": name, "description": tool.description}
            if isinstance(tool, CustomTool):
                function["parameters"] = _INPUT
                if tool.format is not None and tool.format.get("type") != "text":
                    said = f"{tool.description or ''}\nIts input has this format: {json.dumps(tool.format)}"
                    function["description"] = said.strip()
            else:
                function["parameters"] = tool.parameters
            given = {key: value for key, value in function.items() if value is not None}
            self.tools.append({"type": "function", "function": given})


def joined(namespace: str | None, name: str) -> str:
    """A function's name in prompts."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def toolbox(body: Responses) -> tuple[Toolbox, Mapping[str, Origin]]:
    """The tools of a body, and where each comes from.

    Raises:
        Refused: one that must be called is not among them, or two have one name.
    """
    flat = Flat()
    for tool in body.tools or ():
        flat.add(tool)
    check_names(flat.tools)
    asked, parallel, origins = body.tool_choice, body.parallel_tool_calls is not False, flat.origins
    if isinstance(asked, AllowedChoice):
        names = [tool.name for tool in asked.tools if isinstance(tool, FunctionChoice)]
        return Toolbox(*allowed(asked.mode, names, flat.tools), parallel, flat.left_out), origins
    name = asked.name if isinstance(asked, FunctionChoice) else None
    how = None if isinstance(asked, FunctionChoice) else asked
    return Toolbox(flat.tools, chosen(how, name, flat.tools), parallel, flat.left_out), origins


def schema_of(body: Responses) -> dict[str, Any] | None:
    """The schema of the answer; None if it has none.

    Raises:
        Refused: it is missing.
    """
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.schema_ is None:
        raise Refused(400, "a format of type json_schema needs a schema", "text")
    return form.schema_


def conversation(
    service: Service, body: Responses, box: Toolbox
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversation in the format of chat templates, and their options."""
    told = body.instructions
    turns = [] if told is None else [{"role": "system", "content": content_of(told, "system")}]
    asked = [ResponseMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    dialogue = service.dialogue
    turns, options = dialogue.prepared(dialogue.spread([*turns, *_turns(asked)]), box.shown)
    effort = body.reasoning.effort if body.reasoning is not None else None
    return turns, options | dialogue.variables(thinking_of(body)[0], effort)


def thinking_of(body: Responses) -> tuple[bool | None, int | None]:
    """Whether reasoning is asked for, and its budget; None for what the client does not say."""
    asked = body.reasoning or Reasoning()
    wanted = None if asked.effort is None else asked.effort != "none"
    return wanted, None if asked.max_tokens == -1 else asked.max_tokens


def _turns(items: Seq[Any]) -> list[dict[str, Any]]:
    """Items as turns: reasoning, text and calls that follow one another are one of the assistant."""
    turns, names = list[dict[str, Any]](), dict[str, str]()
    for item in items:
        if isinstance(item, OutputItem):
            turn = {"role": "tool", "content": content_of(item.output, "tool"), "tool_call_id": item.call_id}
            turns.append(turn | ({"name": names[item.call_id]} if item.call_id in names else {}))
        elif isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or ())
            if thought:
                turns.append({"role": "assistant", "content": "", "reasoning_content": thought})
        elif isinstance(item, ResponseMessage):
            role = "system" if item.role == "developer" else item.role
            last, text = turns[-1] if turns else {}, content_of(item.content, role)
            if role == "assistant" and last.get("reasoning_content") and not last["content"]:
                last["content"] = text
            else:
                turns.append({"role": role, "content": text})
        else:
            name = names[item.call_id] = joined(item.namespace, item.name)
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            turns[-1].setdefault("tool_calls", []).append(_call(item, name))
    return turns


def _call(item: FunctionCallItem | CustomCallItem, name: str) -> dict[str, Any]:
    given = item.arguments if isinstance(item, FunctionCallItem) else json.dumps({"input": item.input})
    return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": given}}

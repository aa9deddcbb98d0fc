"""Conversations as a model's template can show them: with tools, their calls and results, and reasoning.

What a template has no place for is written into the texts of messages, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outpace.core import OutpaceError
from outpace.loading import Loaded
from outpace.serve.calls import THOUGHT, Bare, CallFormat, DeepSeek, Listed, NamedCalls, Tagged, literal
from outpace.serve.harmony import Harmony, one_call_each
from outpace.serve.marked import Coder, Dsml, Gemma, Glm

Turn = dict[str, Any]
_GENERIC = Tagged()
_PROBE = "qzprobe"  # a word that no template has of its own
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": _PROBE,
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": _PROBE}}},
    },
}
_ARGUMENTS = {"x": f"{_PROBE}sent"}
_CALLED: list[Turn] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": _PROBE, "arguments": _ARGUMENTS}}
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "name": _PROBE, "content": f"{_PROBE}found"},
]
_USER: Turn = {"role": "user", "content": "a"}
_PREAMBLE = """\
You can call functions. Each line between <tools> and </tools> describes one as JSON:
<tools>
{tools}
</tools>
To call a function, write this, with its name and its arguments as JSON:
<tool_call>
{{"name": NAME, "arguments": OBJECT}}
</tool_call>
What it returned is then sent between <tool_response> and </tool_response>."""


@dataclass(frozen=True)
class Abilities:
    """What a model's template shows of a conversation.

    Attributes:
        tools, calls, systems: the tools; calls and their results; messages of the system after others.
        system: messages of the system at all.
    """

    tools: bool
    calls: bool
    system: bool
    systems: bool


class Dialogue:
    """The template of a model, seen by what it renders.

    Args:
        model: the model, with its tokenizer; without a template everything is unknown.
    """

    def __init__(self, model: Loaded) -> None:
        self._model = model

    @cached_property
    def template(self) -> str:
        """The text of the template, of all of them if there are several."""
        found = getattr(self._model.tokenizer, "chat_template", None) or ""
        return "\n".join(found.values()) if isinstance(found, Mapping) else str(found)

    @cached_property
    def abilities(self) -> Abilities:
        """What the template shows, from rendering conversations with and without it."""
        own = f"{_PROBE}own"
        system: Turn = {"role": "system", "content": own}
        tools = _PROBE in self._seen([_USER], tools=[_TOOL])
        with_tools = {"tools": [_TOOL]} if tools else {}
        called = self._seen([_USER, *_CALLED, _USER], **with_tools)
        late = self._seen([_USER, {"role": "assistant", "content": "a"}, system, _USER])
        return Abilities(
            tools,
            tools and all(f"{_PROBE}{what}" in called for what in ("sent", "found")),
            own in self._seen([system, _USER]),
            own in late,
        )

    @cached_property
    def thinks(self) -> bool:
        return self.harmony or self.thought is not None

    @cached_property
    def thought(self) -> tuple[str, str] | None:
        return thought_of(self.template)

    @cached_property
    def harmony(self) -> bool:
        """True if answers are messages on channels, with tools or without."""
        return isinstance(format_of(self.template), Harmony)

    @cached_property
    def format(self) -> CallFormat:
        """The format of calls: the template's, or the generic one if it has no place for tools."""
        return format_of(self.template) if self.abilities.tools else _GENERIC

    @cached_property
    def tokens(self) -> dict[str, int]:
        """The marks of calls and of reasoning that are tokens of their own, whatever their kind, with ids."""
        model, vocabulary = self._model, self._model.tokenizer.get_vocab()
        marks = (*self.format.marks, *(Harmony().marks if self.harmony else ()), *(self.thought or ()))
        ids = {mark: vocabulary[mark] for mark in marks if mark in vocabulary}
        return {mark: token for mark, token in ids.items() if model.plain_tokens(mark)[-1:] == [token]}

    def term(self, mark: str) -> str:
        """A mark as a term of a grammar: its token, or its text."""
        return f"<[{self.tokens[mark]}]>" if mark in self.tokens else literal(mark)

    @cached_property
    def silent(self) -> dict[int, str]:
        """Those of the marks that have no text, since they are special tokens, by their ids."""
        decode = self._model.tokenizer.decode
        return {
            token: mark
            for mark, token in self.tokens.items()
            if not decode([token], skip_special_tokens=True).strip()
        }

    @cached_property
    def parted(self) -> bool:
        """True if the template shows texts only as parts of a list."""
        one = {"role": "user", "content": _PROBE}
        return _PROBE not in self._shown([one]) and _PROBE in self._shown(as_parts([one]))

    @cached_property
    def images(self) -> bool:
        images = self._model.images
        turn: Turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _PROBE}]}
        return images is not None and images.mark in self._shown([turn])

    @cached_property
    def shows_in_results(self) -> bool:
        """True if the template shows images in results, where they stand."""
        images, (call, result) = self._model.images, _CALLED
        parts = [{"type": "image"}, {"type": "text", "text": result["content"]}]
        shown = self._seen([_USER, call, {**result, "content": parts}], tools=[_TOOL])
        return images is not None and 0 <= shown.find(images.mark) < shown.find(result["content"])

    def variables(self, thinks: bool | None, effort: str | None) -> dict[str, Any]:
        """The template's variables for reasoning and its effort; none that it does not read."""
        given = {"enable_thinking": thinks, "reasoning_effort": effort}
        known = self._model.template_options if thinks is not None or effort is not None else frozenset()
        return {name: value for name, value in given.items() if value is not None and name in known}

    def _shown(self, turns: Seq[Turn], **options: Any) -> str:
        """A conversation in the template; "" if it is rejected."""
        try:
            return self._model.render(turns, **options)
        except OutpaceError:
            return ""

    def _seen(self, turns: Seq[Turn], **options: Any) -> str:
        """A conversation of texts as the template shows it; "" if it is rejected."""
        return self._shown(as_parts(turns) if self.parted else turns, **options)

    def prepared(self, turns: Seq[Turn], tools: Seq[dict[str, Any]]) -> tuple[list[Turn], dict[str, Any]]:
        """A conversation as the template can show it, and the options of rendering it.

        Args:
            turns: dicts with "role" and "content", and what templates know of calls.
            tools: the tools, in OpenAI's format for chats.
        """
        able, found = self.abilities, list(turns)
        if not able.calls:
            found = [_in_text(turn) for turn in found]
        elif any(_is_result(turn) and isinstance(turn["content"], list) for turn in turns):
            found = found if self.shows_in_results else _after(found)
        if tools and not able.tools:
            found = _with_system(found, _PREAMBLE.format(tools="\n".join(map(_line, tools))))
        if not able.system:
            found = _without_system(found)
        if isinstance(self.format, Harmony):
            found = one_call_each(found)
        return _joined(found) if found != list(turns) else found, {
            "tools": list(tools)
        } if tools and able.tools else {}

    def spread(self, turns: Seq[Turn]) -> list[Turn]:
        """Turns with the system's first ones as one, and its later ones as the user's, if they must be."""
        first = next((place for place, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
        head = "\n\n".join(turn["content"] for turn in turns[:first])
        found = [{"role": "system", "content": head}] if first else []
        late = "system" if self.abilities.systems else "user"
        rest = [{**turn, "role": late} if turn["role"] == "system" else turn for turn in turns[first:]]
        return _joined([*found, *rest])


def as_parts(turns: Seq[Turn]) -> list[Turn]:
    """Turns whose contents are lists of parts."""
    return [{**turn, "content": _parts(turn["content"])} for turn in turns]


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def format_of(template: str) -> CallFormat:
    """The format of calls of a template that shows tools."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Harmony()
    if "｜DSML｜" in template:
        return Dsml()
    if "<｜tool▁calls▁begin｜>" in template:
        fenced = "```json" in template
        return DeepSeek(fenced=True, tail="\n```" + DeepSeek.tail) if fenced else DeepSeek()
    if "<|tool_call>" in template:
        return Gemma("<|tool_call>", "<tool_call|>", '<|"|>')
    if "<start_function_call>" in template:
        return Gemma()
    if "<arg_key>" in template:
        return Glm()
    if "<function=" in template and "<tool_call>" in template:
        return Coder()
    if "[TOOL_CALLS]" in template:
        return NamedCalls() if "[ARGS]" in template else Listed()
    if "<tool_call>" in template:
        return _GENERIC
    return Bare() if "<|python_tag|>" in template or "ipython" in template else Bare("arguments")


def thought_of(template: str) -> tuple[str, str] | None:
    """The marks around reasoning in a template; None if it has none."""
    return next((marks for marks in THOUGHT if all(mark in template for mark in marks)), None)


def _line(tool: dict[str, Any]) -> str:
    return json.dumps(tool["function"], ensure_ascii=False)


def _in_text(turn: Turn) -> Turn:
    """A turn whose calls, or whose result of one, are in its text."""
    if _is_result(turn):
        head, tail, content = "<tool_response>\n", "\n</tool_response>", turn["content"]
        if isinstance(content, str):
            return {"role": "user", "content": f"{head}{content}{tail}"}
        return {"role": "user", "content": [*_parts(head), *content, *_parts(tail)]}
    if not turn.get("tool_calls"):
        return turn
    said = [turn["content"]] if turn["content"] else []
    for call in turn["tool_calls"]:
        function = call["function"]
        said.append(f"{_GENERIC.head(function['name'])}{function['arguments']}{_GENERIC.tail}")
    return {"role": "assistant", "content": "\n".join(said)}


def _is_result(turn: Turn) -> bool:
    return turn["role"] in ("tool", "function")


def _after(turns: Seq[Turn]) -> list[Turn]:
    """Turns of which the images in results are in a message of the user after these results, by numbers."""
    found, images, number = list[Turn](), list[dict[str, str]](), 0
    for turn in [*turns, None]:
        if images and (turn is None or not _is_result(turn)):
            found.append({"role": "user", "content": images})
            images = []
        if turn is None:
            break
        if _is_result(turn) and isinstance(turn["content"], list):
            text = ""
            for part in turn["content"]:
                if part["type"] == "image":
                    number += 1
                    images += [*_parts(f"[image {number}]"), part]
                    text += f"[image {number}]"
                else:
                    text += part["text"]
            turn = {**turn, "content": text}
        found.append(turn)
    return found


def _with_system(turns: Seq[Turn], text: str) -> list[Turn]:
    """Turns of which the system's first one ends with this text."""
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _without_system(turns: Seq[Turn]) -> list[Turn]:
    """Turns of which the system's are the user's."""
    return [{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns]


def _joined(turns: Seq[Turn]) -> list[Turn]:
    """Turns of which those of the user or the assistant that follow one another are one."""
    found = list[Turn]()
    for turn in turns:
        last = found[-1] if found else None
        plain = last is not None and set(last) == set(turn) == {"role", "content"}
        if (
            last is not None
            and plain
            and last["role"] == turn["role"]
            and turn["role"] in ("user", "assistant")
        ):
            found[-1] = {**last, "content": _both(last["content"], turn["content"])}
        else:
            found.append(turn)
    return found


def _both(first: Any, second: Any) -> Any:
    """Two contents as one, with a line break between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [*_parts(first), {"type": "text", "text": "\n"}, *_parts(second)]

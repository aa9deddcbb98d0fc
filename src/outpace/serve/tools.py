"""The tools of a request, the same for all APIs: what prompts show, what forces a call, what reads one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.responses import Response

from outpace.core import StreamedToken
from outpace.grammars.effects import lists_keys
from outpace.serve.answers import Answer, Manner, Said
from outpace.serve.calls import THOUGHT, JsonCalls, arguments_of, literal
from outpace.serve.dialogue import Dialogue
from outpace.serve.errors import Refused
from outpace.serve.harmony import HarmonyAnswer
from outpace.serve.json_calls import Signature
from outpace.serve.request import ParsedRequest
from outpace.serve.schemas import Lark
from outpace.serve.service import Service
from outpace.serve.thinking import ReasoningPart, reasoning_of

_log = logging.getLogger("outpace.serve")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,256}")
LEFT_OUT = "x-outpace-tools-left-out"


@dataclass(frozen=True)
class Toolbox:
    """The functions that a request offers.

    Attributes:
        tools: in OpenAI's format for chats, as templates expect them.
        choice: whether the answer may call one, or the names of which it must call one.
        parallel: the answer may have several calls.
        left_out: types of tools that the server would have to run, which the prompt does not show.
    """

    tools: Seq[dict[str, Any]] = ()
    choice: Literal["none", "auto"] | tuple[str, ...] = "auto"
    parallel: bool = True
    left_out: Seq[str] = ()

    @property
    def shown(self) -> Seq[dict[str, Any]]:
        return () if self.choice == "none" else self.tools

    @property
    def functions(self) -> dict[str, Signature]:
        found = {}
        for tool in self.shown:
            function = tool["function"]
            parameters = function.get("parameters") or {"type": "object", "properties": {}}
            found[function["name"]] = Signature(function["name"], parameters)
        if isinstance(self.choice, tuple):
            return {name: found[name] for name in self.choice}
        return found

    def named(self, response: Response) -> Response:
        """A response whose header names the tools that are left out."""
        if self.left_out:
            response.headers[LEFT_OUT] = ", ".join(dict.fromkeys(self.left_out))
        return response

    def grammar(self, dialogue: Dialogue) -> Lark | None:
        """The grammar of the call that the answer must be; None if it need not be one.

        Raises:
            Refused: a name is invalid, or a schema is not that of an object.
        """
        if not isinstance(self.choice, tuple):
            return None
        for name in self.choice:
            if not _NAME.fullmatch(name):
                raise Refused(400, "a tool's name has letters, digits, _, . and - only", "tools")
            _check_schema(name, self.functions[name].parameters)
        functions = list(self.functions.values())
        write = dialogue.format.grammar
        schemas = {function.name: function.parameters for function in functions}
        listed = all(lists_keys(arguments_of(function)) for function in functions)
        unlisted = isinstance(dialogue.format, JsonCalls) and not listed
        return Lark(write(functions, dialogue.term), write(functions, literal), schemas, unlisted)


def _check_schema(name: str, schema: dict[str, Any]) -> None:
    """Refuse a schema of arguments that are no object."""
    if schema.get("type", "object") != "object":
        raise Refused(400, f"the parameters of {name!r} must have the type object", "tools")
    for key in ("properties", "$defs", "definitions"):
        if not isinstance(schema.get(key, {}), dict):
            raise Refused(400, f"{key} in the parameters of {name!r} must be an object", "tools")


def chosen(choice: str | None, name: str | None, tools: Seq[dict[str, Any]]) -> Any:
    """A ``Toolbox.choice``.

    Args:
        choice: "none", "auto", "required", or None for the default.
        name: the name of the function that must be called.

    Raises:
        Refused: it is not among the tools, or there are none.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    if name is not None:
        names = tuple(one for one in names if one == name)
    elif choice != "required":
        return choice or "auto"
    if not names:
        raise Refused(400, "tool_choice names a tool that is not among tools", "tool_choice")
    return names


def allowed(
    mode: Literal["auto", "required"], names: Seq[str], tools: Seq[dict[str, Any]]
) -> tuple[Seq[dict[str, Any]], Any]:
    """The tools that the prompt shows, and a ``Toolbox.choice``, if an answer may call some of them alone.

    Where it must call one, its grammar keeps it to them, and the prompt stays; otherwise it shows no others.

    Raises:
        Refused: one is not among the tools, or there are none.
    """
    known = [tool["function"]["name"] for tool in tools]
    if others := [name for name in names if name not in known]:
        raise Refused(400, f"tool_choice allows {others[0]!r}, which is not among tools", "tool_choice")
    few = [tool for tool, name in zip(tools, known, strict=True) if name in names]
    return (few, "auto") if mode == "auto" else (tools, chosen("required", None, few))


def check_names(tools: Seq[dict[str, Any]]) -> None:
    """Refuse two functions of one name.

    Raises:
        Refused: there are some.
    """
    seen = set[str]()
    for tool in tools:
        name = tool["function"]["name"]
        if name in seen:
            raise Refused(400, f"two tools are called {name!r}; rename one", "tools")
        seen.add(name)


def reasoning_of_answer(
    service: Service, box: Toolbox, prompt: Seq[int], schema: Any, wanted: bool | None, budget: int | None
) -> ReasoningPart | None:
    """The reasoning that an answer may begin with.

    Args:
        prompt: token ids of the prompt, which may end in the mark that begins reasoning, or in its end.
        schema: what the answer must be otherwise; None for any text.
        wanted: whether the client asks for reasoning; None if it does not say.
        budget: maximum number of its tokens; None for no limit.
    """
    dialogue, forced = service.dialogue, isinstance(box.choice, tuple)
    asked = wanted is True or budget is not None
    if schema is not None and (wanted is False or (dialogue.harmony and not asked)):
        return None
    shown, free = bool(box.shown), schema is None
    return reasoning_of(service.model, dialogue, prompt, budget, free=free, tools=shown, called=forced)


def answer_to(service: Service, box: Toolbox, request: ParsedRequest) -> Answer | Templated:
    tokenizer, dialogue, reasoning = service.model.tokenizer, service.dialogue, request.reasoning
    forced, free = isinstance(box.choice, tuple), request.schema is None
    if box.shown and not forced and getattr(tokenizer, "response_template", None):
        return Templated(service, box, request.prompts[0])
    channels = dialogue.harmony and (free or forced or reasoning is not None)
    functions = box.functions if free or forced else {}
    called = bool(functions) and (channels or not dialogue.harmony)
    thinks = reasoning is not None and not channels
    manner = Manner(
        dialogue.format if called else None,
        functions,
        forced,
        box.parallel,
        dialogue.silent if called or channels or thinks else {},
        thinks,
        thinks and reasoning is not None and reasoning.begun,
        dialogue.thought or THOUGHT[0],
    )
    return (HarmonyAnswer if channels else Answer)(
        manner, lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
    )


@dataclass
class Templated:
    """Parser of a whole answer by its tokenizer's own response template; same interface as ``Answer``."""

    service: Service
    box: Toolbox
    prompt: Seq[int]
    calls: int = 0
    _tokens: list[int] = field(default_factory=list)
    _text: str = ""

    def push(self, tokens: Seq[StreamedToken]) -> list[Said]:
        """Add what was emitted; nothing is known before the end."""
        self._tokens += [token.token for token in tokens]
        self._text += "".join(token.text for token in tokens)
        return []

    def end(self, complete: bool) -> list[Said]:
        """The answer's reasoning, text and calls."""
        model = self.service.model
        ids = [token for token in self._tokens if token not in model.target.eos_token_ids]
        try:
            parsed = model.tokenizer.parse_response(ids, prefix=list(self.prompt), tools=list(self.box.tools))
            calls = [
                (call["function"]["name"], json.dumps(call["function"]["arguments"]))
                for call in parsed.get("tool_calls") or ()
            ]
        except Exception as error:  # a template may fail in any way on unexpected text
            _log.warning("the response template failed, so the answer is text: %s", error)
            return [Said("text", self._text)] if self._text else []
        found = [Said("reasoning", parsed["reasoning_content"])] if parsed.get("reasoning_content") else []
        found += [Said("text", parsed["content"])] if parsed.get("content") else []
        for name, arguments in calls if self.box.parallel else calls[:1]:
            found.append(Said("call", arguments, self.calls, name))
            self.calls += 1
        return found

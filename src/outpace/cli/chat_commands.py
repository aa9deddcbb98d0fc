"""The commands in a chat, as in ``/set temperature 0.7``. Imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

from outpace.cli.prompts import read_text
from outpace.cli.writer import check_out
from outpace.core import OutpaceError, near

ENDS = ("exit", "quit", "bye")
_COMMANDS = {
    "help": "list the commands",
    "clear": "forget the conversation (also /reset)",
    "set": "show the settings; /set NAME VALUE changes one, /set NAME alone takes the model's own",
    "save": "/save FILE writes the conversation as JSON",
    "load": "/load FILE goes on with one that was written",
    "exit": "end, as Ctrl-D does",
}
_AS = {"reset": "clear", "h": "help", "?": "help", "new": "clear"}
# What may be set, besides the system message.
SETTINGS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
)
_ROLES = ("system", "user", "assistant")


class Conversation(Protocol):
    """What commands change; a ``Chat``."""

    messages: list[dict[str, str]]
    system: str
    asked: dict[str, Any]
    params: Any

    def set(self, asked: dict[str, Any]) -> None: ...

    @property
    def turns(self) -> list[dict[str, str]]: ...


def run_command(chat: Conversation, name: str, rest: str) -> str:
    """Run a command and return what it says.

    Raises:
        OutpaceError: there is no such command, or it cannot be run.
    """
    name = _AS.get(name, name)
    if name not in _COMMANDS:
        hint = near(name, _COMMANDS) or " /help lists them"
        raise OutpaceError(f"there is no command /{name}.{hint}")
    if name == "help":
        width = max(map(len, _COMMANDS)) + 2
        told = [f"/{one:{width}}{what}" for one, what in _COMMANDS.items()]
        return "\n".join([*told, "A line that ends in \\ goes on in the next, and so does pasted text."])
    if name == "clear":
        chat.messages.clear()
        return "(the conversation is forgotten)"
    if name == "set":
        name, _, value = re.sub(r"^(\w[\w-]*)\s*=", r"\1 ", rest).partition(" ")
        return _set(chat, name, value.strip())
    if not rest:
        raise OutpaceError(f"/{name} needs a file, as in /{name} talk.json")
    return (_save if name == "save" else _load)(chat, Path(rest).expanduser())


def _set(chat: Conversation, name: str, value: str) -> str:
    name = name.replace("-", "_")
    name = {"max_tokens": "max_new_tokens", "n": "max_new_tokens"}.get(name, name)
    if name == "system":
        chat.system = value
    elif name in SETTINGS:
        asked = {key: one for key, one in chat.asked.items() if key != name}
        chat.set(asked | ({name: _number(name, value)} if value else {}))
    elif name:
        known = ("system", *SETTINGS)
        raise OutpaceError(f"there is no setting {name!r}.{near(name, known) or f' There are: {known}'}")
    shown = [f"{one} {getattr(chat.params, one)}" for one in SETTINGS]
    return f"(system {json.dumps(chat.system, ensure_ascii=False)}, {', '.join(shown)})"


def _number(name: str, value: str) -> int | float:
    whole = name in ("max_new_tokens", "top_k", "seed")
    try:
        return int(value) if whole else float(value)
    except ValueError:
        raise OutpaceError(f"{name} is a {'whole ' * whole}number, not {value!r}") from None


def _save(chat: Conversation, file: Path) -> str:
    check_out(file, overwrite=False, remedy="give another name")
    file.write_text(json.dumps(chat.turns, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"({len(chat.turns)} messages in {file})"


def _load(chat: Conversation, file: Path) -> str:
    try:
        turns = json.loads(read_text(file))
    except ValueError as error:
        if isinstance(error, OutpaceError):
            raise
        raise OutpaceError(f"{file} is not JSON: {error}") from None
    if not isinstance(turns, list) or not all(map(_is_message, turns)):
        raise OutpaceError(f'{file} is no conversation: a list of {{"role": "user", "content": "Hi"}}')
    chat.system = "\n".join(one["content"] for one in turns if one["role"] == "system")
    chat.messages[:] = [one for one in turns if one["role"] != "system"]
    return f"({len(turns)} messages from {file})"


def _is_message(one: object) -> bool:
    return isinstance(one, dict) and one.get("role") in _ROLES and isinstance(one.get("content"), str)

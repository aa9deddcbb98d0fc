"""The look of ``--help``: plain text, options in groups, everyday ones first, and no word cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

RARE = "For special models and machines"  # the group that follows the others
_NAMES = 26  # columns of the names of options; the text of longer ones begins on the next line

F = TypeVar("F", bound=Callable[..., Any])
Groups = dict[str, list[tuple[str, str]]]


# The options that words without one are for, by command, from the last: `generate smollm2 "Hi"`.
_WORDS = {
    "chat": ("--model",),
    "serve": ("--model",),
    "env": ("--model",),
    "generate": ("--model", "--prompt"),
}


class Command(TyperCommand):
    """A command whose help shows its options in groups, and which takes words for its main options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = _WORDS.get(self.name or "", ())
        if options and not ctx.resilient_parsing:
            given, words, _ = self.make_parser(ctx).parse_args(args=list(args))
            taken = _taken(options, words, given)
            for word, option in zip(words, taken, strict=True) if taken else ():
                if given.get(option.strip("-")) is not None:
                    ctx.fail(f"give {word!r} or {option}, not both")
            if self.name == "chat" and len(words) > 1:
                ctx.fail(
                    f"a chat reads messages line by line; for one answer: outpace generate {words[0]} ..."
                )
            args = _with_options(args, words, taken)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(_options(self, ctx), formatter)


class Group(TyperGroup):
    """A command with others below it, whose help shows both in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: Groups = {}
        for name, command in self.commands.items():
            if not command.hidden:
                title = getattr(command, "rich_help_panel", None) or "Commands"
                about = command.short_help or (command.help or "").partition("\n\n")[0]
                groups.setdefault(title, []).append((name, " ".join(about.split())))
        _write({**_options(self, ctx), **groups}, formatter)


class App(typer.Typer):
    """An application of such commands."""

    def command(self, name: str | None = None, **given: Any) -> Callable[[F], F]:
        return super().command(name, **{"cls": Command, **given})


def _taken(options: tuple[str, ...], words: list[str], given: dict[str, Any]) -> tuple[str, ...]:
    """The options that words are for: one word is the last's, unless it can only be meant as the model."""
    from outpace.names import means_a_model

    if len(words) == 1 < len(options) and given.get("model") is None:
        elsewhere = any(given.get(option) is not None for option in ("prompt", "file", "audio"))
        if elsewhere or means_a_model(words[0]):
            return options[:1]
    return options[-len(words) :] if 0 < len(words) <= len(options) else ()


def _with_options(args: list[str], words: list[str], options: tuple[str, ...]) -> list[str]:
    """A command line with each of these words after its option."""
    found = list(args)
    for word, option in zip(words, options, strict=False):
        found[found.index(word)] = f"{option}={word}"
    return [one for one in found if one != "--"] if options else found


def _options(command: Any, ctx: Any) -> Groups:
    """Names and texts of options by group; the rare ones, and --help alone, at the end."""
    groups: Groups = {}
    for param in command.get_params(ctx):
        if (row := param.get_help_record(ctx)) is not None:
            usual = "Options" if param.param_type_name == "option" else "Arguments"
            groups.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(row)
    alone = len(groups["Options"]) == 1
    return dict(
        sorted(groups.items(), key=lambda each: (each[0] == RARE) + 2 * (each[0] == "Options" and alone))
    )


def _write(groups: Groups, formatter: Any) -> None:
    for title, rows in groups.items():
        with formatter.section(typer.style(title, bold=True)):
            formatter.write_dl([(typer.style(name, bold=True), about) for name, about in rows], _NAMES)

"""The application with which commands register: error messages, exit codes, display of results.

Exit codes: 0 success; 1 outputs that should be equal differ; 2 a mistake in the input; 130 Ctrl-C.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.table import Table

from outpace._version import __version__
from outpace.cli import screen
from outpace.cli.layout import App, Group
from outpace.core import OutpaceError, first_line, near, out_of_memory
from outpace.plugins import installed, load_object, package_of, why_absent

P = ParamSpec("P")
T = TypeVar("T")

NOT_EQUAL, MISTAKE, INTERRUPTED = 1, 2, 130


# Other programs' names of commands, for ours.
KNOWN_AS = {"run": "chat", "list": "models", "ls": "models"}


class _Commands(Group):
    """The commands; one that is in another package is named with that package."""

    kind = "command"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.kind == "command" and args and args[0] not in self.commands:
            args = [KNOWN_AS.get(args[0], args[0]), *args[1:]]
        if args and args[0] not in self.commands and (advice := why_absent(self.kind, args[0])):
            ctx.fail(advice)
        if args and args[0] not in self.commands and (hint := near(args[0], self.commands)):
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


class _Benchmarks(_Commands):
    kind = "benchmark"


app = App(
    name="outpace",
    cls=_Commands,
    help="Faster decoding of Hugging Face models and GGUF files, exact as docs/concepts/exactness.md has it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
benchmarks = App(cls=_Benchmarks)
app.add_typer(benchmarks, name="bench")


def add_plugins(app: typer.Typer) -> None:
    """Add the commands of other packages, each under its package's name; a failure is reported in a line."""
    for name, entry in sorted(installed("commands").items()):
        known = _registered(app)
        try:
            load_object("commands of", entry)(app)
        except Exception as error:  # whatever a package raises, the other commands work
            screen.note(f"the commands of {name} are left out: {first_line(error)}", style="yellow")
        for command in _registered(app):
            if command not in known:
                command.rich_help_panel = command.rich_help_panel or package_of(entry)


def _registered(app: typer.Typer) -> list[Any]:
    return [*app.registered_commands, *app.registered_groups, *benchmarks.registered_commands]


def fail(message: str) -> None:
    screen.note(f"Error: {message}", style="bold red")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Report a user's mistake, Ctrl-C or lack of memory as a message and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except OutpaceError as error:
            fail(str(error))
            raise typer.Exit(MISTAKE) from None
        except KeyboardInterrupt:
            screen.note("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except ImportError as error:
            if not _interrupted(error):
                raise
            screen.note("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # the reader of our output has closed it; typer ends quietly
        except OSError as error:
            fail(str(error))
            raise typer.Exit(MISTAKE) from None
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            fail(
                "out of memory; a shorter prompt, a smaller --batch or --max-new-tokens, or --dtype bfloat16 "
                f"needs less ({str(error).splitlines()[0] if str(error) else 'no details'})"
            )
            raise typer.Exit(MISTAKE) from None

    return run


def _interrupted(error: BaseException | None) -> bool:
    """True if an error was caused by Ctrl-C, which transformers' lazy modules turn into an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def finish(whole: bool, equal: bool = True) -> None:
    """Exit with the code of a command that ran."""
    if not whole:
        screen.note("interrupted")
        raise typer.Exit(INTERRUPTED)
    if not equal:
        raise typer.Exit(NOT_EQUAL)


def show(found: T, as_json: bool, table: Callable[[T], Any]) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        console, made = screen.out(), table(found)
        console.print(screen.fitting(made, console) if isinstance(made, Table) and made.show_header else made)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass

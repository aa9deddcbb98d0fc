"""``outpace new-drafter``: a drafter of one's own, as one file to begin with."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import screen
from outpace.cli.app import app, guarded
from outpace.core import OutpaceError
from outpace.files import replace_text

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name, as in my_drafter.", show_default=False)]


@app.command("new-drafter", epilog="Example: outpace new-drafter my_drafter")
@guarded
def new_drafter(name: Name) -> None:
    """Write NAME.py, a small drafter that works and passes outpace.testing.check_drafter.

    Change its method; docs/guides/add-a-drafter.md explains each line.
    """
    if not (name.isidentifier() and name == name.lower() and name.strip("_")):
        raise OutpaceError(f"a drafter's name has small letters, digits and underscores; not {name!r}")
    file = Path(f"{name}.py")
    if file.exists():
        raise OutpaceError(f"{file} is there already; give another name, or move it")
    if find_spec(name) is not None:
        raise OutpaceError(f"Python has a module {name!r} already, which would hide it; give another name")
    title = "".join(part.capitalize() for part in name.split("_"))
    replace_text(file, _TEMPLATE.replace("NAME", name).replace("TITLE", title))
    screen.note(f"wrote {file}")
    screen.note(f"  check it  python {file}")
    screen.note(f'  use it    outpace generate --prompt "one two one two" --drafter {name}:{title}:length=4')


_TEMPLATE = '''\
"""The drafter TITLE. Check it: python NAME.py. Use it: --drafter NAME:TITLE:length=4"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from outpace.core import Draft
from outpace.drafters import SequenceDrafter
from outpace.sequence import Sequence, Step
from outpace.tree import chain


@dataclass
class State:
    """What the drafter knows of one request."""

    sequence: Sequence  # sequence.tokens grows as tokens are committed
    follower: dict[int, int] = field(default_factory=dict)  # token -> the one that followed it last
    read: int = 0


@dataclass(frozen=True)
class TITLE(SequenceDrafter[State]):
    """Drafts a chain in which each token is the last one that followed its predecessor.

    Attributes:
        length: maximum number of tokens drafted per step, at least 1.
    """

    length: int = 4

    paper: ClassVar[str] = "none: a beginning"

    def __post_init__(self) -> None:
        self.check_least(length=1)

    def start(self, sequence: Sequence, shared: Any) -> State:
        """Begin a request: sequence.tokens is its prompt."""
        state = State(sequence)
        self._read(state)
        return state

    def draft(self, state: State) -> Draft:
        """Guess the tokens after the last one; an empty draft is allowed."""
        guesses = [state.sequence.tokens[-1]]
        while len(guesses) <= self.length and guesses[-1] in state.follower:
            guesses.append(state.follower[guesses[-1]])
        return chain(guesses[1:])

    def learn(self, state: State, step: Step) -> None:
        """Learn from a step, whose tokens are in sequence.tokens now."""
        self._read(state)

    def _read(self, state: State) -> None:
        tokens = state.sequence.tokens
        for place in range(state.read, len(tokens) - 1):
            state.follower[tokens[place]] = tokens[place + 1]
        state.read = len(tokens) - 1


if __name__ == "__main__":
    from outpace.testing import check_drafter

    check_drafter(TITLE())
    print("TITLE keeps the contract of a drafter")
'''

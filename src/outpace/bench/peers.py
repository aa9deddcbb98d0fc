"""Peers: other libraries' decoding, measured beside outpace's.

outpace has one, transformers in this process. Other packages register theirs in the group ``outpace.peers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from outpace.bench.runs import Method
from outpace.bench.stock import StockMethod, load_assistant
from outpace.core import OutpaceError
from outpace.loading import Loaded
from outpace.names import STOCK, TRANSFORMERS, check_method, check_peers
from outpace.plugins import installed, load_object


@dataclass(frozen=True)
class PeerOptions:
    """What peers are made with.

    Attributes:
        folder: a folder of the benchmark's, for files that a peer needs; None if it may write none.
        assistant: the draft model of transformers' assisted generation: hub name or folder.
        weights: the model's weights in the format of a peer that does not read the model's own.
        length: maximum number of tokens of a prompt with its answer.
        temperature: temperature of the requests; above 0, peers draw other noise than outpace.
    """

    folder: Path | None = None
    assistant: str | None = None
    weights: Path | None = None
    length: int = 2048
    temperature: float = 0.0


@dataclass(frozen=True)
class Library:
    """A library that decodes; an entry point of the group ``outpace.peers`` names one.

    Attributes:
        kinds: names of its methods.
        make: makes a method for a model, from its kind and the environment that contains the library, None
            for this process's; it raises OutpaceError if it cannot.
        elsewhere: it may be in another environment.
    """

    kinds: tuple[str, ...]
    make: Callable[[Loaded, str, Path | None, PeerOptions], Method]
    elsewhere: bool = True


@dataclass(frozen=True)
class Peer:
    """A library's method; ``environment`` contains the library, None for this process's."""

    library: str
    kind: str
    environment: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.library}:{self.kind}"

    def make(self, subject: Loaded, options: PeerOptions) -> Method:
        """Make the method.

        Raises:
            OutpaceError: it cannot be made.
        """
        return library_of(self.library).make(subject, self.kind, self.environment, options)


def _stock(subject: Loaded, kind: str, environment: Path | None, options: PeerOptions) -> Method:
    del environment
    assistant = None
    if kind == "assisted" and options.assistant is not None:
        assistant = load_assistant(options.assistant, subject.dtype, subject.device)
    model = subject.target.model
    if model is None:
        raise OutpaceError("transformers as a peer needs a transformers model; use --peers none")
    return StockMethod(model, kind, assistant, options.temperature, subject.target.start)


def library_of(name: str) -> Library:
    """A library by its name.

    Raises:
        OutpaceError: there is no such peer, or its package cannot be imported.
    """
    check_peers(name)
    if name == TRANSFORMERS:
        return Library(STOCK, _stock, elsewhere=False)
    found = load_object("peer", installed("peers")[name])
    if not isinstance(found, Library):
        raise OutpaceError(f"the peer {name} is {found!r}, and a peer is an outpace.bench.peers.Library")
    return found


def split_peers(text: str) -> list[Peer]:
    """Parse a list of peers such as ``transformers:plain,vllm=/path/to/venv``; ``none`` for no peer.

    A library's name alone selects all of its methods.

    Raises:
        OutpaceError: unknown library or method, or a path for a library that runs in this process.
    """
    found: list[Peer] = []
    for piece in text.split(","):
        name, _, place = piece.strip().partition("=")
        library, _, kind = name.partition(":")
        if name in ("", "none"):
            continue
        chosen = library_of(library)
        if kind:
            check_method(library, kind, chosen.kinds)
        if place and not chosen.elsewhere:
            raise OutpaceError(f"{library} runs in this process; leave its path out")
        environment = Path(place).expanduser() if place else None
        found += [Peer(library, one, environment) for one in ((kind,) if kind else chosen.kinds)]
    names = [peer.name for peer in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OutpaceError(f"--peers has {twice[0]} twice")
    return found


def versions_of(methods: Seq[Method]) -> dict[str, Mapping[str, str]]:
    """Versions in the environments of other libraries' methods, by library."""
    return {method.name.partition(":")[0]: method.versions for method in methods if method.versions}

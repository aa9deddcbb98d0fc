"""Methods that a benchmark compares: outpace's drafters, and peers by name."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from outpace.bench.ours import Ours
from outpace.bench.runs import BASELINE, Method
from outpace.bench.stock import KINDS, Stock, load_assistant
from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.engine.parts import Adaptive
from outpace.loading import Loaded
from outpace.targets import is_gguf
from outpace_lab.bench.peers import worker_of

LIBRARIES = {
    "transformers": KINDS,
    "vllm": ("plain", "ngram", "suffix"),
    "llama.cpp": ("plain", "prompt_lookup"),
    "llama-server": ("plain", "ngram-mod", "ngram-simple"),
}
READ_GGUF = ("llama.cpp", "llama-server")
_OPTION = re.compile(r"\s*\w+\s*=")


@dataclass(frozen=True)
class Peer:
    """Another library's method; ``environment`` contains the library, None for this process's."""

    library: str
    kind: str
    environment: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.library}:{self.kind}"


@dataclass(frozen=True)
class PeerOptions:
    """Options of peers.

    Attributes:
        assistant: the draft model of transformers' assisted generation: hub name or folder.
        gguf: the model's weights as a GGUF file, for llama.cpp.
        length: maximum number of tokens of a prompt with its answer.
        temperature: temperature of the requests; above 0, peers draw other noise than outpace.
    """

    assistant: str | None = None
    gguf: Path | None = None
    length: int = 2048
    temperature: float = 0.0


def split_drafters(text: str) -> list[str]:
    """Split a list of drafters' specs at its commas.

    A comma within parentheses, or before ``name=``, belongs to a spec. Plain decoding comes first, listed or
    not, since all others are compared with it.

    Raises:
        OutpaceError: a spec is empty, or given twice.
    """
    specs: list[str] = []
    depth = 0
    for piece in text.split(","):
        if specs and (depth > 0 or _OPTION.match(piece)):
            specs[-1] += "," + piece
        else:
            specs.append(piece)
        depth += piece.count("(") - piece.count(")")
    specs = [spec.strip() for spec in specs]
    if not all(specs):
        raise OutpaceError(f"--drafters has an empty name in {text!r}; write none,lookahead,prompt_lookup")
    others = [spec for spec in specs if spec != BASELINE]
    twice = sorted({spec for spec in others if others.count(spec) > 1})
    if twice:
        raise OutpaceError(f"--drafters has {twice[0]} twice")
    return [BASELINE, *others]


def with_lengths(specs: Seq[str], lengths: Seq[int]) -> list[str]:
    """Repeat each drafter that has ``num_speculative_tokens`` with every length; keep the others.

    Raises:
        OutpaceError: no drafter has this option, or a spec sets it already.
    """
    option = "num_speculative_tokens"
    found: list[str] = []
    for spec in specs:
        if not hasattr(load_drafter(spec), option):
            found.append(spec)
        elif option in spec:
            raise OutpaceError(f"--lengths sets the draft's length; leave {option} out of {spec}")
        else:
            found += [f"{spec}{',' if ':' in spec else ':'}{option}={length}" for length in lengths]
    if found == list(specs):
        raise OutpaceError(
            f"no drafter of --drafters has {option}, which --lengths sets; give one that has, or leave "
            "--lengths out"
        )
    return found


def split_peers(text: str) -> list[Peer]:
    """Parse a list of peers such as ``transformers:plain,vllm=/path/to/venv``; ``none`` for no peer.

    A library's name alone selects all of its methods.

    Raises:
        OutpaceError: unknown library or method, or a path that is not an environment.
    """
    found: list[Peer] = []
    for piece in text.split(","):
        name, _, place = piece.strip().partition("=")
        library, _, kind = name.partition(":")
        if name in ("", "none"):
            continue
        if library not in LIBRARIES:
            raise OutpaceError(f"there is no peer {library!r}; there are: {', '.join(LIBRARIES)}")
        if kind and kind not in LIBRARIES[library]:
            raise OutpaceError(f"{library} has no method {kind!r}; it has: {', '.join(LIBRARIES[library])}")
        if place and library == "transformers":
            raise OutpaceError("transformers runs in this process; leave its path out")
        environment = Path(place).expanduser() if place else None
        found += [Peer(library, one, environment) for one in ((kind,) if kind else LIBRARIES[library])]
    names = [peer.name for peer in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OutpaceError(f"--peers has {twice[0]} twice")
    return found


def make_methods(
    subject: Loaded,
    drafters: Seq[str],
    verifier: str,
    adaptive: Adaptive,
    peers: Seq[Peer],
    options: PeerOptions,
) -> list[Method]:
    """Make every method, plain decoding first.

    Raises:
        OutpaceError: a method cannot be made; the message names it.
    """
    methods: list[Method] = []
    try:
        for spec in drafters:
            try:
                methods.append(Ours(subject.target, spec, verifier, adaptive, options.temperature))
            except OutpaceError as error:
                raise type(error)(f"{spec}: {error}") from None
        assistant = None
        for peer in peers:
            if peer.library != "transformers":
                methods.append(_worker(subject, peer, options))
                continue
            if peer.kind == "assisted" and options.assistant is not None and assistant is None:
                assistant = load_assistant(options.assistant, subject.dtype, subject.device)
            model = subject.target.model
            if model is None:
                raise OutpaceError("transformers as a peer needs a transformers model; use --peers none")
            start = subject.target.start
            methods.append(Stock(model, peer.kind, assistant, options.temperature, start))
    except BaseException:
        close_all(methods)
        raise
    return methods


def _worker(subject: Loaded, peer: Peer, options: PeerOptions) -> Method:
    source = subject.source
    if peer.library in READ_GGUF:
        if options.gguf is None:
            raise OutpaceError(
                f"{peer.library} reads GGUF files: add --gguf FILE, of the same model; or leave it out"
            )
        if not options.gguf.is_file():
            raise OutpaceError(f"no such file: {options.gguf}; --gguf is the model's weights for llama.cpp")
        source = str(options.gguf)
    if not source:
        raise OutpaceError(
            f"{peer.library} loads a model from its folder, and {subject.name} is in memory alone; write it "
            "with `outpace grow --out DIR`, and give --model DIR in place of --like"
        )
    return worker_of(
        peer.library,
        peer.kind,
        peer.environment,
        {
            "model": source,
            # Dtype of keys and values too: llama.cpp's default for a quantised model.
            "dtype": "float16" if is_gguf(subject.source) else subject.dtype,
            "device": subject.device,
            "length": options.length,
            "threads": torch.get_num_threads(),
            "eos": sorted(subject.target.eos_token_ids),
        },
        # Where an end token is ignored, llama-server draws another token instead of continuing after it.
        promised=options.temperature == 0 and peer.library != "llama-server",
    )


def close_all(methods: Seq[Method]) -> None:
    """Release the methods' resources, which ends their processes."""
    for method in methods:
        method.close()

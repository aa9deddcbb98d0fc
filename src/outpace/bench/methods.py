"""Methods that a benchmark compares: outpace's drafters, and peers."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.bench.ours import Ours
from outpace.bench.peers import Peer, PeerOptions
from outpace.bench.runs import BASELINE, Method
from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.engine.parts import Adaptive
from outpace.loading import Loaded
from outpace.spec_text import split_specs


def split_drafters(text: str) -> list[str]:
    """Split a list of drafters' specs at its commas.

    Plain decoding comes first, listed or not, since all others are compared with it.

    Raises:
        OutpaceError: a spec is empty, or given twice.
    """
    specs = split_specs(text)
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
        for peer in peers:
            methods.append(peer.make(subject, options))
    except BaseException:
        close_all(methods)
        raise
    return methods


def close_all(methods: Seq[Method]) -> None:
    for method in methods:
        method.close()

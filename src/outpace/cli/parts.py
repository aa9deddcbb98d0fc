"""Conversion of options to objects: sampling parameters, the model, the drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import screen
from outpace.core import (
    DEFAULT_DRAFTER,
    USUAL,
    OutpaceError,
    SamplingParams,
    TargetOptions,
    need,
    uncollected,
)
from outpace.names import (
    Backend,
    by_llamacpp,
    check_backend,
    check_llamacpp,
    check_names,
    check_peers,
    check_suite,
    is_gguf,
)
from outpace.spec_text import split_specs

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.usual import Chosen
    from outpace.loading import Loaded
    from outpace.loading.placement import Place
    from outpace.loading.weights import Encoders

_OF_DRAWS = ("top_k", "top_p", "min_p")  # without an effect on greedy decoding


def sampling(**values: Any) -> SamplingParams:
    """SamplingParams from command line options; errors name the option as the user wrote it.

    Raises:
        OutpaceError: a value is invalid, or has no effect because decoding is greedy.
    """
    try:
        params = SamplingParams(**values)
    except OutpaceError as error:
        name, _, rest = str(error).partition(" ")
        raise OutpaceError(f"--{name.replace('_', '-')} {rest}" if name in values else str(error)) from None
    check_draws(params, values)
    return params


def check_draws(params: SamplingParams, given: Mapping[str, Any]) -> None:
    """Refuse what was given and has no effect on greedy decoding."""
    for name in _OF_DRAWS:
        if params.greedy and given.get(name, getattr(params, name)) != getattr(SamplingParams, name):
            raise OutpaceError(
                f"--{name.replace('_', '-')} has no effect at temperature 0, which takes the most probable "
                "token; give --temperature, or leave it out"
            )


@dataclass(frozen=True)
class ModelSource:
    """The options of a model and of loading it, as for ``outpace.load``.

    Attributes:
        releases: free those of the model's own weights of which steps have copies: nothing learns from it,
            and nothing runs it by itself.
    """

    model: str | None
    place: Place
    dtype: str
    trust_remote_code: bool
    llamacpp: str = ""
    seq2seq: Encoders = False
    options: TargetOptions = USUAL
    backend: Backend = "auto"
    releases: bool = False

    def load(self, drafter: str = "none", verifier: str = "match", references: bool = False) -> Loaded:
        """Load the model, after checking the drafter and the verifier."""
        self.check_names(drafter, verifier)
        with screen.busy(f"loading {self.model or 'the embedded model'} ..."), uncollected():
            from outpace.loading import load
            from outpace.loading.weights import needs_of_name

            self.check(drafter, verifier, references)
            trust = self.trust_remote_code
            if (needs := needs_of_name(self.model, self.dtype, self.place, trust, self.seq2seq)) is not None:
                screen.note(f"{self.model}: {needs}")
            loaded = load(
                self.model,
                self.dtype,
                self.place,
                trust_remote_code=trust,
                llamacpp=self.llamacpp,
                backend=self.backend,
                seq2seq=self.seq2seq,
                **vars(self.options),
            )
            if self.releases:
                loaded.target.release()
            return loaded

    def check_names(self, drafter: str = "", verifier: str = "match") -> None:
        """Refuse unknown names and missing extras, before torch is imported."""
        device = self.place if isinstance(self.place, str) else None
        check_names(self.model, self.dtype, device, drafter, verifier)
        check_llamacpp(self.model, self.llamacpp)
        check_backend(self.model, self.backend, self.llamacpp)
        if is_gguf(self.model or ""):
            by_other = by_llamacpp(self.model, self.backend, self.llamacpp)
            need("llamacpp" if by_other else "gguf", "a GGUF file")

    def check(self, drafter: str, verifier: str, references: bool) -> None:
        """Refuse a drafter or a verifier that is unknown, before the model is loaded."""
        from outpace.verify import load_verifier

        check_drafter(drafter, references)
        load_verifier(verifier)


def profiled(
    source: ModelSource,
    drafter: str,
    profile: Path | None,
    verifier: str,
    references: bool = False,
    at_once: Iterable[int] = (1,),
    remark: Callable[[str], None] = screen.note,
) -> tuple[Loaded, Chosen]:
    """Load the model, and choose the drafter: the given one, the profile's, or the default.

    Args:
        at_once: numbers of prompts that will be decoded together.
        remark: called with a message if the profile was tuned for another number.
    """
    if profile is not None and not profile.is_file():
        raise OutpaceError(f"there is no profile at {profile}; `outpace tune --out {profile}` writes one")
    if profile is None:
        loaded = source.load(drafter or DEFAULT_DRAFTER, verifier, references)
        from outpace.engine.usual import Chosen, usual

        if drafter:
            return loaded, Chosen.of(drafter, "as asked for")
        with screen.busy("looking for a drafter ..."):
            chosen = usual(loaded.target, verifier)
        if "(self)" in chosen.spec:
            with screen.busy("rounding weights for drafts ..."):
                own: Any = loaded.target.rounded()
                own.make()
        return loaded, chosen
    if drafter:
        raise OutpaceError("give --drafter or --profile, not both: the profile names its drafter")
    source.check_names(verifier=verifier)
    from outpace.engine.profile import load_profile, other_batch, read_profiles

    read_profiles(profile)  # reports errors in the file before the model loads
    loaded = source.load(verifier=verifier)
    known = load_profile(profile, loaded.target)
    check_drafter(known.drafter, references)
    if (told := other_batch(known, at_once)) is not None:
        remark(told)
    from outpace.engine.usual import Chosen

    return replace(loaded, costs=known.costs), Chosen.of(known.drafter, "the profile's")


def check_drafter(spec: str, references: bool) -> None:
    """Refuse an unknown drafter, or one that ignores the given references."""
    from outpace.drafters import load_drafter

    if not load_drafter(spec).reads_references and references:
        raise OutpaceError(
            f"--drafter {spec} reads no references; use --drafter reference, or leave them out"
        )


def labelled(drafter: str, engine: Engine) -> str:
    """Label of an engine beside plain decoding: its drafter, and its verifier if that changes the tokens."""
    return drafter if engine.verifier.invariant else f"{drafter}, {engine.verifier}"


def check_listed(suites: str, drafters: str, peers: str = "") -> None:
    """Refuse an unknown suite, drafter or peer in lists of them, before torch is imported."""
    for name in suites.split(","):
        check_suite(name.strip())
    for spec in split_specs(drafters):
        if spec:
            check_names(drafter=spec)
    check_peers(peers)


def check_length(max_new_tokens: int) -> None:
    """Refuse answers too short to measure decoding after the first step."""
    if max_new_tokens < 2:
        raise OutpaceError("--max-new-tokens must be at least 2: the first token comes with the prompt")


def numbers(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """Parse a list of numbers.

    Raises:
        OutpaceError: they are not distinct numbers of at least ``least``.
    """
    try:
        found = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise OutpaceError(f"--{option} takes numbers, as in 2,4,8; not {text!r}") from None
    if min(found) < least or len(set(found)) < len(found):
        raise OutpaceError(f"--{option} takes distinct numbers of at least {least}; not {text!r}")
    return found

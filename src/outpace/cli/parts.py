"""Conversion of options to objects: sampling parameters, the model, the drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import screen
from outpace.core import OutpaceError, SamplingParams

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded, Place

DEFAULT_DRAFTER = "lookahead"


def sampling(**values: Any) -> SamplingParams:
    """SamplingParams from command line options; errors name the option as the user wrote it."""
    try:
        return SamplingParams(**values)
    except OutpaceError as error:
        name, _, rest = str(error).partition(" ")
        raise OutpaceError(f"--{name.replace('_', '-')} {rest}" if name in values else str(error)) from None


def parts(
    drafter: str,
    verifier: str,
    model: str | None,
    device: Place,
    dtype: str,
    trust_remote_code: bool,
    references: bool = False,
    like: str | None = None,
    llamacpp: str = "",
) -> Loaded:
    """Load the model, after checking the drafter and the verifier."""
    with screen.busy(f"loading {model or 'the embedded model'} ..."):
        from outpace.loading import load, needs_of_name
        from outpace.verify import load_verifier

        check_drafter(drafter, references)
        load_verifier(verifier)
        if like is None:
            if (needs := needs_of_name(model, dtype, device, trust_remote_code)) is not None:
                screen.note(f"{model}: {needs}")
            return load(model, dtype, device, trust_remote_code=trust_remote_code, llamacpp=llamacpp)
        if not isinstance(device, str | None):
            raise OutpaceError("--like grows a model on one device; leave --device-map and --parallel out")
        if llamacpp:
            raise OutpaceError("--llamacpp is for .gguf files, which --like does not grow; leave one out")
        from outpace.bench.lab.grown import load_grown

        return load_grown(model, like, dtype, device, trust_remote_code=trust_remote_code)


def profiled(
    drafter: str,
    profile: Path | None,
    verifier: str,
    model: str | None,
    device: Place,
    dtype: str,
    trust_remote_code: bool,
    references: bool = False,
    like: str | None = None,
    llamacpp: str = "",
    at_once: Iterable[int] = (1,),
    remark: Callable[[str], None] = screen.note,
) -> tuple[Loaded, str]:
    """Load the model, and choose the drafter: the given one, the profile's, or the default.

    Args:
        at_once: numbers of prompts that will be decoded together.
        remark: called with a message if the profile was tuned for another number.
    """
    loading = (verifier, model, device, dtype, trust_remote_code)
    more: dict[str, Any] = {"like": like, "llamacpp": llamacpp}
    if profile is None:
        spec = drafter or DEFAULT_DRAFTER
        return parts(spec, *loading, references, **more), spec
    if drafter:
        raise OutpaceError("give --drafter or --profile, not both: the profile names its drafter")
    from outpace.engine.profile import load_profile, other_batch, read_profiles

    read_profiles(profile)  # reports errors in the file before the model loads
    loaded = parts("none", *loading, **more)
    known = load_profile(profile, loaded.target)
    check_drafter(known.drafter, references)
    if (told := other_batch(known, at_once)) is not None:
        remark(told)
    return replace(loaded, costs=known.costs), known.drafter


def check_drafter(spec: str, references: bool) -> None:
    """Refuse an unknown drafter, or one that ignores the given references."""
    from outpace.drafters import load_drafter

    if references and not load_drafter(spec).reads_references:
        raise OutpaceError(
            f"--drafter {spec} reads no references; use --drafter reference, or leave them out"
        )
    load_drafter(spec)


def labelled(drafter: str, engine: Engine) -> str:
    """Label of an engine beside plain decoding: its drafter, and its verifier if that changes the tokens."""
    return drafter if engine.verifier.invariant else f"{drafter}, {engine.verifier}"


def check_length(max_new_tokens: int) -> None:
    """Refuse answers too short to measure decoding after the first step."""
    if max_new_tokens < 2:
        raise OutpaceError("--max-new-tokens must be at least 2: the first token comes with the prompt")

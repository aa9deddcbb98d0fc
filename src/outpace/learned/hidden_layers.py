"""Choice of the target's layers whose hidden states a drafter reads."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.core import OutpaceError
from outpace.targets.base import TargetModel


def low_middle_high(count: int) -> tuple[int, ...]:
    """The layers that published drafters read from a target with ``count`` layers."""
    return (2, count // 2, count - 3)


def check_layers(method: str, layers: Seq[int], target: TargetModel) -> None:
    """Check that a target has the layers that a drafter reads, numbered as in ``Output.hidden``.

    Raises:
        OutpaceError: it has fewer.
    """
    named = [layer for layer in layers if layer != -1]
    if not named:
        return
    try:
        count = target.layers
    except OutpaceError:  # the number of layers is unknown, so nothing is checked
        return
    if not all(0 <= layer <= count for layer in named):
        raise OutpaceError(
            f"{method}: it reads the target's hidden states at layers {named}, but this one has {count}; "
            f"give layers from 0 to {count}, or train a drafter for this target"
        )


def default_layers(target: TargetModel) -> tuple[int, ...]:
    """A low, a middle and a high layer of a target; those of published drafters if it has enough layers.

    Raises:
        OutpaceError: the target's number of layers is unknown.
    """
    count = target.layers
    return low_middle_high(count) if count > 7 else tuple(sorted({1, (count + 1) // 2, count - 1}))

"""Which hidden states of a target a drafter reads where nobody says."""

from __future__ import annotations

from outpace.targets.base import TargetModel


def low_middle_high(count: int) -> tuple[int, ...]:
    """The layers that published drafters read, of a target with so many layers."""
    return (2, count // 2, count - 3)


def default_layers(target: TargetModel) -> tuple[int, ...]:
    """A low, a middle and a high layer of a target; those of published drafters where it has enough.

    Raises:
        OutpaceError: the target does not say how many layers it has.
    """
    count = target.layers
    return low_middle_high(count) if count > 7 else tuple(sorted({1, (count + 1) // 2, count - 1}))

"""Which layers of a target a drafter reads where nobody says."""

from __future__ import annotations

from outpace.core import OutpaceError
from outpace.targets.base import TargetModel


def low_middle_high(count: int) -> tuple[int, ...]:
    """The layers that published drafters read, of a target with so many layers."""
    return (2, count // 2, count - 3)


def default_layers(target: TargetModel) -> tuple[int, ...]:
    """A low, a middle and a high layer of a target; those of published drafters where it has enough."""
    count = layers_of(target)
    return low_middle_high(count) if count > 7 else tuple(sorted({1, (count + 1) // 2, count - 1}))


def layers_of(target: TargetModel) -> int:
    """How many layers a target has.

    Raises:
        OutpaceError: it does not say.
    """
    config = getattr(getattr(target, "model", None), "config", None)
    if config is None:
        raise OutpaceError("this target does not say how many layers it has; give those to read")
    count: int = config.get_text_config(decoder=True).num_hidden_layers
    return count

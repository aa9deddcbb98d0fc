"""Placement of a model: one device, several devices, or several processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outpace.cli import screen
from outpace.core import OutpaceError, RanksLost
from outpace.names import read_device_map

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading.placement import Place

PARALLEL = ("draft", "tensor")


def spread_of(device: str | None, device_map: str | None) -> Place:
    """Parse one device or several, of this process.

    Raises:
        OutpaceError: both are given, or the map is invalid.
    """
    if device_map is None:
        return device
    if device is not None:
        raise OutpaceError("give --device or --device-map, not both")
    read_device_map(device_map)
    from outpace.loading.placement import Spread

    return Spread.of(device_map)


def place_of(
    device: str | None,
    device_map: str | None,
    parallel: str | None,
    timeout: float,
    model: str | None,
    dtype: str,
    trust_remote_code: bool,
) -> Place:
    """The place that the options describe; of several processes only the first returns, the others serve it.

    Raises:
        OutpaceError: options exclude each other, or no launcher has started several processes.
        SystemExit: in the other processes, when the first has ended.
    """
    if parallel is None:
        return spread_of(device, device_map)
    if device_map is not None:
        raise OutpaceError("with --parallel each process has one device; leave --device-map out")
    if parallel not in PARALLEL:
        raise OutpaceError(f"--parallel must be {' or '.join(PARALLEL)}, not {parallel!r}")
    if device not in (None, "cpu", "cuda"):
        raise OutpaceError("with --parallel each process has the device of its number; leave --device out")
    from outpace.loading import load
    from outpace.loading.placement import SharedModel
    from outpace.targets.ranks.processes import Ranks

    ranks = Ranks.of_launcher(timeout)
    shared = SharedModel(ranks, "draft" if parallel == "draft" else "tensor")
    if not ranks.leads:
        try:
            load(model, dtype, shared, trust_remote_code=trust_remote_code)
        except RanksLost as error:
            if not error.here:  # reported by the process that noticed it
                raise SystemExit(2) from None
            raise
    return shared


def note_traffic(engine: Engine) -> None:
    """Print what several processes shared; nothing for one process."""
    from outpace.targets.ranks.led import LedTarget
    from outpace.targets.ranks.processes import Ranks
    from outpace.targets.ranks.shared_drafts import ParallelTarget

    target = engine.target
    if not isinstance(target, LedTarget) or not isinstance(target.ranks, Ranks):
        return
    note = f"{target.ranks.size} ranks, {target.ranks.sent} bytes of messages"
    if isinstance(target.inner, ParallelTarget) and (traffic := target.inner.traffic).steps:
        steps, least = traffic.steps, target.inner.least
        note += (
            f"; {traffic.shared} of {steps} steps shared; {traffic.rows / steps:.1f} of "
            f"{traffic.whole / steps:.1f} rows per step here, {traffic.bytes / steps:.0f} bytes of tokens; "
        )
        note += f"sharing pays from {least} rows on" if least < math.inf else "sharing pays at no width here"
    screen.note(note)

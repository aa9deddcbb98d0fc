"""Sizes of the tiles of attention kernels, by the shared memory of a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

# Shared memory of a program where no GPU tells: that of the smallest ones (sm_75, gfx942), in bytes.
_LEAST_SHARED = 64 << 10


class Tiles(NamedTuple):
    """Tiles of an attention kernel.

    Attributes:
        rows: of a block.
        columns: per iteration.
        stages: iterations whose keys and values are in shared memory at once.
    """

    rows: int
    columns: int
    stages: int

    def shared(self, size: int, wide: int, itemsize: int) -> int:
        """Bytes of shared memory that Triton's compiler takes, at most.

        Per stage a tile of keys and one of values, and the words of the mask, of 8 bytes; the query, and what
        is exchanged between threads.

        Args:
            size, wide: of heads and of their values, padded.
        """
        stage = self.columns * ((size + wide) * itemsize + 8 * self.rows)
        return self.stages * stage + self.rows * max(size, wide) * itemsize // 2


# From the fastest to the one that always fits.
_TILES = (
    Tiles(64, 32, 3),
    Tiles(64, 32, 2),
    Tiles(32, 32, 2),
    Tiles(16, 32, 2),
    Tiles(32, 32, 1),
    Tiles(16, 32, 1),
    Tiles(16, 16, 1),
)


def tiles_for(rows: int, size: int, wide: int, itemsize: int, shared: int) -> Tiles:
    """The first tiles that fit into this many bytes of shared memory, of no more rows than there are.

    Args:
        rows: to attend for at once: a power of two, at least 16.
        size, wide, itemsize: as of ``Tiles.shared``.
    """
    few = [tiles._replace(rows=min(tiles.rows, rows)) for tiles in _TILES]
    fit = [tiles for tiles in few if tiles.shared(size, wide, itemsize) <= shared]
    return fit[0] if fit else few[-1]


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program of a GPU may take, in bytes."""
    if device.type != "cuda":
        return _LEAST_SHARED
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)

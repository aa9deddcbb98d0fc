"""When outputs that are not plain decoding's break the promise that they are."""

from __future__ import annotations

from collections.abc import Iterable

from outpace.bench.rows import Difference

NEAR_TIE = 1e-4
_PROMISED = ("float32", "float64")


def broken(differences: Iterable[Difference], dtype: str) -> bool:
    """Whether any of the differences breaks the promise that a method's outputs are plain decoding's.

    In float32 a near-tie may go either way. In smaller dtypes near-ties are common: nothing is promised.

    Args:
        dtype: the model's, as torch writes it.
    """
    return dtype in _PROMISED and any(one.margin is None or one.margin >= NEAR_TIE for one in differences)

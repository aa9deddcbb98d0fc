"""The versions of transformers that outpace's tests run on, and a warning for newer ones."""

from __future__ import annotations

import logging
import re
from functools import lru_cache

import transformers

_log = logging.getLogger(__name__)

# The lowest is pyproject.toml's, the highest that of constraints.txt; in both, major and minor.
LOWEST, HIGHEST = (5, 10), (5, 24)


@lru_cache(maxsize=8)
def warn_of_untested(version: str = transformers.__version__) -> None:
    """Warn, once, of a version of transformers that is newer than those tested.

    It is not refused: whether it changed what a target relies on, the self-test of each model finds out.
    """
    major, minor = map(int, re.findall(r"\d+", version)[:2])
    if (major, minor) > HIGHEST:
        _log.warning(
            "transformers %s is newer than the versions that outpace is tested with, %d.%d to %d.%d; the "
            'self-test of each model decides. If it refuses one: pip install "transformers<%d.%d"',
            version,
            *LOWEST,
            *HIGHEST,
            HIGHEST[0],
            HIGHEST[1] + 1,
        )

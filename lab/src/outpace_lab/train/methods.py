"""The methods that can be trained: outpace's own and those of the laboratory."""

from __future__ import annotations

from outpace import drafters
from outpace.learned.learned import Learned
from outpace.plugins import defined

LEARNED: dict[str, type[Learned]] = drafters.LEARNED | {
    cls.method: cls for cls in defined("outpace_lab.drafters", Learned, "method")
}

"""The methods that can be trained: outpace's own and those of the laboratory."""

from __future__ import annotations

from outpace.plugins import defined
from outpace_lab.train.modules.blocks import TrainedDFlash
from outpace_lab.train.modules.draft_model import TrainedDraft
from outpace_lab.train.modules.eagle import TrainedEagle
from outpace_lab.train.modules.heads import TrainedHydra, TrainedMedusa
from outpace_lab.train.modules.mtp import TrainedMtp
from outpace_lab.train.trained import Trained

_CORE: tuple[type[Trained], ...] = (
    TrainedDFlash,
    TrainedDraft,
    TrainedEagle,
    TrainedHydra,
    TrainedMedusa,
    TrainedMtp,
)

_CLASSES = [*_CORE, *defined("outpace_lab.drafters", Trained, "method")]
LEARNED: dict[str, type[Trained]] = {cls.method: cls for cls in sorted(_CLASSES, key=lambda cls: cls.method)}

"""Self-speculative decoding: the target drafts with some of its layers skipped (Zhang et al. 2023).

Draft & Verify: no second model, no training, no extra memory. The remaining layers attend to the rows that
the full target has committed, and append those of the draft, which the verification by all layers overwrites.
So there is no prompt to read and nothing to catch up on.

Differences from the paper: whole layers are skipped, where the paper chooses attention and feed-forward parts
separately; by default drafts are drawn with the target's own noise; the threshold at which a draft ends is
fixed, where the paper adapts it during decoding (here the governor chooses the length). ``outpace search``
(``train/skipping.py``) finds the layers to skip.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.support.draws import Draws, Noise, check_confidence, log_confidence
from outpace.drafters.support.shapes import shape_of
from outpace.drafters.support.within import PartShared, Within, place_of
from outpace.files import read_json
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel
from outpace_lab.drafters.layers.chains import draft_by_part


@dataclass(frozen=True)
class SelfSpeculative(Drafter[Within]):
    """Drafting with the target without some of its layers.

    Attributes:
        skip: the layers to skip, counted from 0, as "2+4+5"; or a JSON file that ``outpace search`` wrote.
        num_speculative_tokens: tokens in the chain, at least 1.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": its most probable tokens.
        min_confidence: in [0, 1]: the chain continues only if the best token has at least this probability.
    """

    skip: str | tuple[int, ...] = ()
    num_speculative_tokens: int = 4
    draws: Noise = "coupled"
    min_confidence: float = 0.0

    when: ClassVar[str] = "to study drafting without some of the model's layers"
    needs: ClassVar[str] = "the layers, from outpace search"
    paper: ClassVar[str] = (
        "Zhang et al. 2023, Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative "
        "Decoding (arXiv 2309.08168)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_least(num_speculative_tokens=1)
        self.check_choices("draws")
        check_confidence("self_speculative", self.min_confidence)

    def skipped(self, layers: int) -> tuple[int, ...]:
        """The skipped layers of a target of ``layers`` layers, ascending.

        Raises:
            OutpaceError: none is named, they do not fit the target, or the file contains none.
        """
        found = sorted(set(_read(self.skip, layers) if isinstance(self.skip, str) else self.skip))
        if not found:
            raise OutpaceError(
                "self_speculative: name the layers to skip, as in self_speculative:skip=2+4; "
                "`outpace search` finds the best"
            )
        if found[0] < 0 or found[-1] >= layers or len(found) == layers:
            raise OutpaceError(
                f"self_speculative: the target has layers 0 to {layers - 1}, and at least one must "
                f"stay; skip={'+'.join(map(str, found))} does not fit it"
            )
        return tuple(found)

    def prepare(self, target: TargetModel) -> PartShared:
        skipped = self.skipped(target.layers)
        return PartShared(
            shape=shape_of(self.num_speculative_tokens, method="self_speculative"),
            draws=Draws(self.draws, weigh=self.min_confidence > 0),
            least=log_confidence(self.min_confidence),
            by_path=False,
            part=target.some_layers([layer for layer in range(target.layers) if layer not in skipped]),
        )

    def start(self, sequence: Sequence, shared: PartShared) -> Within:
        return Within(sequence, shared, place_of(sequence, "self_speculative"))

    def propose(self, states: Seq[Within]) -> list[Draft]:
        return draft_by_part(states)


def _read(text: str, layers: int) -> list[int]:
    """Parse layers: numbers joined by plus signs, or the name of a file that contains them."""
    if not text.endswith(".json"):
        try:
            return [int(part) for part in text.split("+") if part]
        except ValueError as error:
            raise OutpaceError(
                f"self_speculative: skip must be layers, as in 2+4+5, or a .json file; not {text!r}"
            ) from error
    try:
        found = read_json(Path(text))
        skipped, known = [int(layer) for layer in found["skip"]], int(found["layers"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise OutpaceError(
            f"self_speculative: {text!r} contains no layers to skip; write it with outpace search: {error!r}"
        ) from error
    if known != layers:
        raise OutpaceError(
            f"self_speculative: {text!r} is for a target of {known} layers, but this one has {layers}; "
            "search again with outpace search"
        )
    return skipped

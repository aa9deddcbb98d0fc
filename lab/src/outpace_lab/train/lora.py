"""Low-rank updates of a target's weights (LoRA, Hu et al. 2021, arXiv 2106.09685), through peft.

The modules inserted into a loaded model hold updates of zero, so its outputs do not change. The updates being
trained are kept apart and passed to ``target.through``. They are saved as a folder of peft's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.drafters.support.shapes import numbers
from outpace.spec import check_least
from outpace.targets.weights.adapters import import_peft, without_advice

_PREFIX = "base_model.model."  # before the model's own names, in peft's files


@dataclass(frozen=True)
class LoRA:
    """Options of a target's low-rank updates and of training them with a drafter.

    Attributes:
        rank: the rank of each update, at least 1.
        alpha: updates are scaled by alpha / rank.
        layers: the layers updated, numbered from 0, as in "2+4+5"; all by default.
        weight: of the target's own loss, relative to the drafter's; at least 0.
        objective: of the target's own loss, a name in ``outpace_lab.train.objectives``. The default keeps the
            target close to its original distribution; "ground_truth" teaches it the text.
        rate: learning rate of the updates, relative to the drafter's; above 0.
        warmup: the fraction of the run in which the drafter learns alone, in [0, 1).
    """

    rank: int = 8
    alpha: float = 16.0
    layers: str = ""
    weight: float = 5.0
    objective: str = "forward_kl"
    rate: float = 0.25
    warmup: float = 0.25

    def __post_init__(self) -> None:
        check_least("lora", self, rank=1, weight=0)
        if self.alpha <= 0 or self.rate <= 0 or not 0 <= self.warmup < 1:
            raise OutpaceError("lora: alpha and rate must be above 0, and warmup in [0, 1)")

    def modules(self, model: Any) -> list[str]:
        """The names of the linear modules to update: all but the head, or those of the chosen layers.

        Raises:
            OutpaceError: a chosen layer does not exist, or the model has no linear modules.
        """
        from transformers.pytorch_utils import Conv1D

        wanted = set(numbers("layers", self.layers, "+", int, "lora"))
        head = model.get_output_embeddings()
        names = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        ]
        chosen = [name for name in names if not wanted or _layer(name) in wanted]
        missing = wanted - {_layer(name) for name in chosen}
        if missing or not chosen:
            raise OutpaceError(
                f"lora: {type(model).__name__} has no linear modules in layers {sorted(missing) or 'at all'}"
            )
        return chosen


def _layer(name: str) -> int | None:
    """The layer a module belongs to: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


class Updates:
    """Low-rank updates in a model.

    Attributes:
        names: the names of their weights in the model.

    Args:
        model: a loaded transformers model. Its linear modules are wrapped in modules whose updates are zero.

    Raises:
        OutpaceError: peft is missing, or the options do not fit the model.
    """

    def __init__(self, model: Any, options: LoRA) -> None:
        peft = import_peft("training a model")
        config = peft.LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            target_modules=options.modules(model),
            task_type="CAUSAL_LM",
        )
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise OutpaceError("lora: this model contains low-rank updates already; load it again")
        with without_advice():
            self._peft = peft.get_peft_model(model, config)
        self._own = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
        self.names = tuple(self._own)

    def fresh(self) -> list[nn.Parameter]:
        """Initial weights in the order of the names: an update of zero."""
        return [nn.Parameter(weight.detach().clone()) for weight in self._own.values()]

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the updates as a folder of peft's."""
        held = {_PREFIX + name: weight.detach() for name, weight in weights.items()}
        with without_advice():
            self._peft.save_pretrained(folder, state_dict=held, save_embedding_layers=False)

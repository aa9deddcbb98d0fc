"""What learned drafters share: a trained module, its folder on disk, and the batches it learns from."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.drafting.hidden_layers import check_layers
from outpace.targets.base import TargetModel

# (draft logits [N, vocabulary], target logits [N, vocabulary], labels [N]) -> the loss of each, [N].
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]

L = TypeVar("L", bound="Learned")

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_FORMAT = 1


@dataclass(frozen=True)
class Batch:
    """Packed text, and what the target says at each place of it: B rows of T places.

    Attributes:
        tokens: [B, T].
        positions: [B, T], in the place's own document.
        documents: [B, T], which of the row's documents a place is of; -1 is padding. Nothing looks across.
        counted: [B, T], whether the token is to be learnt: the target's own words, not a prompt's.
        hidden: layer -> [B, T, hidden size], for the layers that the module reads.
        logits: [B, T, vocabulary], the target's own: ``logits[:, t]`` is of ``tokens[:, t + 1]``.
        sampled: the text after the prompts is the drafter's own (on-policy), not the target's.

    Hidden states and logits have no graph; a method that trains the target too runs it itself.
    """

    tokens: Tensor
    positions: Tensor
    documents: Tensor
    counted: Tensor
    hidden: Mapping[int, Tensor]
    logits: Tensor
    sampled: bool = False

    @property
    def labels(self) -> Tensor:
        """[B, T]: what is to be learnt after each place: the text's next token, or the one that the target
        would most probably go on with where the text is the drafter's own. (After the last place: nothing.)
        """
        return self.logits.argmax(dim=-1) if self.sampled else self.tokens.roll(-1, dims=1)

    @property
    def seen(self) -> Tensor:
        """[B, T, T]: whether a place (second axis) sees another: its document's, up to itself."""
        order = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (self.documents[:, :, None] == self.documents[:, None]) & (order[:, None] >= order)

    def ahead(self, distance: int) -> Tensor:
        """[B, T]: whether the place so far ahead is of the same document, and its token counted."""
        found = torch.zeros_like(self.counted)
        if distance < self.tokens.shape[1]:
            stop = self.tokens.shape[1] - distance
            found[:, :stop] = (
                self.counted[:, distance:] & (self.documents[:, distance:] == self.documents[:, :stop])
            ) & (self.documents[:, :stop] >= 0)
        return found


@dataclass(frozen=True)
class Losses:
    """What a batch says about a module, D depths of its draft.

    Attributes:
        total: the scalar to minimise.
        loss: [D], the mean of the objective at each depth.
        acceptance: [D], the share of places where the draft's most probable token is the text's.
        places: [D], how many places those are the means of.
    """

    total: Tensor
    loss: Tensor
    acceptance: Tensor
    places: Tensor


def measure(
    objective: Objective, depths: Iterable[tuple[Tensor, Tensor, Tensor]], weights: Seq[float]
) -> Losses:
    """The losses of a draft whose depths are learnt alike.

    Args:
        depths: at each depth the draft's logits [N, vocabulary], the target's of the same places, and the
            text's tokens [N]; N may be 0.
        weights: of each depth in the total.
    """
    loss, acceptance, places = [], [], []
    for draft, target, labels in depths:
        count = max(len(labels), 1)
        loss.append(objective(draft, target, labels).sum() / count)
        acceptance.append((draft.argmax(dim=-1) == labels).sum() / count)
        places.append(len(labels))
    stacked = torch.stack(loss)
    total = (stacked * torch.tensor(list(weights), dtype=stacked.dtype, device=stacked.device)).sum()
    counts = torch.tensor(places, device=stacked.device)
    return Losses(total, stacked.detach(), torch.stack(acceptance), counts)


def accepted_of_chain(batch: Batch, guesses: Tensor) -> Tensor:
    """How many tokens of a chain stand, drafted at each place of a text.

    Args:
        guesses: [B, T, D], at place t the tokens guessed for t + 1, t + 2, ...

    Returns:
        [B, T], from 0 to D.
    """
    return accepted_at(batch, guesses[..., None])


def accepted_at(batch: Batch, guesses: Tensor) -> Tensor:
    """How many depths stand in a row, where R tokens are guessed for each: [B, T, D, R] -> [B, T]."""
    right = torch.zeros_like(guesses[..., 0], dtype=torch.bool)
    width = batch.tokens.shape[1]
    for depth in range(min(guesses.shape[2], width - 1)):
        stop = width - depth - 1
        same = batch.documents[:, depth + 1 :] == batch.documents[:, :stop]
        equal = (guesses[:, :stop, depth] == batch.tokens[:, depth + 1 :, None]).any(dim=-1)
        right[:, :stop, depth] = equal & same
    return right.cumprod(dim=-1).sum(dim=-1)


@dataclass(frozen=True)
class Fit:
    """Which target a module is for: it fits another of the same sizes, though it was not trained for it."""

    vocabulary: int
    hidden_size: int
    name: str

    @classmethod
    def of(cls, target: TargetModel) -> Fit:
        name = getattr(getattr(target, "model", None), "name_or_path", None) or type(target).__name__
        return cls(target.vocabulary, target.hidden.size, str(name))


@torch.no_grad()
def head_weights(target: TargetModel) -> tuple[Tensor, Tensor] | None:
    """The target's head as a matrix [vocabulary, hidden size] and a bias [vocabulary], which a head of a
    drafter's own begins with. None where it is more than that, such as a soft cap on logits.
    """
    hidden = target.hidden
    units = torch.eye(hidden.size, dtype=hidden.dtype, device=hidden.device)
    bias = target.head(torch.zeros_like(units[0]))
    columns = target.head(units) - bias
    linear = torch.allclose(target.head(-4 * units) - bias, -4 * columns, rtol=1e-4, atol=1e-4)
    return (columns.T, bias) if linear else None


class Learned(nn.Module, ABC):
    """The trained part of a drafter.

    What it shares with the target, the embeddings and the head, is not saved: ``target.embed`` and
    ``target.head`` have it, once the module is bound.

    Class attributes:
        method: the drafter's name.
        config_type: a frozen dataclass of plain values and tuples of them, the options of training from
            scratch.
        fitted: which of the target's sizes it depends on.
        checkpoint_type: the options that are left when going on from a model; None where that cannot be.

    Args:
        config: of ``config_type``.
        fit: the target's sizes.
    """

    method: ClassVar[str]
    config_type: ClassVar[type[Any]]
    fitted: ClassVar[tuple[str, ...]] = ("vocabulary", "hidden_size")
    checkpoint_type: ClassVar[type[Any] | None] = None

    def __init__(self, config: Any, fit: Fit) -> None:
        super().__init__()
        self.config = config
        self.fit = fit
        self._target: TargetModel | None = None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target that it reads, as ``Output.hidden`` counts them."""
        return (-1,)

    def forward(self, batch: Batch, objective: Objective) -> Losses:
        """``loss``, for whoever wraps a module in another: devices that train together."""
        return self.loss(batch, objective)

    @abstractmethod
    def loss(self, batch: Batch, objective: Objective) -> Losses:
        """What it has yet to learn of a batch. It says itself which logits stand against which place."""

    @abstractmethod
    def accepted(self, batch: Batch) -> Tensor:
        """[B, T]: how many tokens of the draft that decoding would make at a place stand, the place's token
        being the root. Greedy, the text taken for the target's own.
        """

    @property
    def context(self) -> int | None:
        """Positions that it was made for; None for as many as the target."""
        return None

    @property
    def writer(self) -> TargetModel:
        """Itself as a language model, to write the text that on-policy training scores.

        Raises:
            OutpaceError: it writes none without the target.
        """
        raise OutpaceError(
            f"{self.method} drafts from what the target says of each place, so it writes no text of its own "
            "to learn from; leave out on_policy, or train a draft_model"
        )

    def accompany(self, folder: Path, tokenizer: Any) -> None:
        """Write what else belongs into its folder, before training. (By default nothing.)"""
        del folder, tokenizer

    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Measure what it drafts by, once it is trained, on text of its own. (By default nothing.)"""
        del batches

    def figures(self, batches: Iterable[Batch]) -> dict[str, float]:
        """What else is to be known of it on held-out text, by name. (By default nothing.)"""
        del batches
        return {}

    # -- how it is trained -------------------------------------------------------------------------------

    def at_step(self, step: int, steps: int) -> None:
        """The update ``step`` of ``steps``, from 0, is about to begin. (By default all are alike.)"""
        del step, steps

    def groups(self) -> list[tuple[float, list[nn.Parameter]]]:
        """Its weights, and the learning rate of each group of them, relative to the run's."""
        return [(1.0, list(self.parameters()))]

    # -- with a target -----------------------------------------------------------------------------------

    @classmethod
    def new(cls: type[L], config: Any, target: TargetModel) -> L:
        """An untrained module for a target, in float32, on its device."""
        made = cls(config, Fit.of(target)).to(target.hidden.device)
        made.bind(target)
        return made

    @classmethod
    def begin(cls: type[L], draft: str, options: Any, target: TargetModel) -> L:
        """A module that goes on from a model, given by folder or name, in float32, on the target's device.

        Args:
            options: of ``checkpoint_type``.

        Raises:
            OutpaceError: its modules are trained from scratch; or there is no such model, or it does not fit.
        """
        raise OutpaceError(f"{cls.method} is no model of its own to go on from; train it from scratch")

    def bind(self, target: TargetModel) -> None:
        """Hand over what is shared.

        Raises:
            OutpaceError: the target does not fit, or the module is another target's already.
        """
        self.check(target)
        if self._target not in (None, target):
            raise OutpaceError(f"{self.method}: this module is bound to a target; load one for each")
        self._target = target

    def check(self, target: TargetModel) -> None:
        """Whether it fits a target.

        Raises:
            OutpaceError: the target has other sizes, or fewer layers than it reads.
        """
        found = Fit.of(target)
        for what in self.fitted:
            if getattr(found, what) != getattr(self.fit, what):
                raise OutpaceError(
                    f"{self.method}: made for {self.fit.name} with a {what.replace('_', ' ')} of "
                    f"{getattr(self.fit, what)}, and this target, {found.name}, has {getattr(found, what)}; "
                    f"train one for it: outpace train {self.method} --model {found.name}"
                )
        check_layers(self.method, self.hidden_layers, target)

    @property
    def target(self) -> TargetModel:
        if self._target is None:
            raise OutpaceError(f"{self.method}: no target yet; call bind(target)")
        return self._target

    @classmethod
    def of(cls: type[L], given: Any, target: TargetModel) -> L:
        """A module that was given itself, bound to the target, or the one in a folder."""
        if isinstance(given, cls):
            given.bind(target)
            return given
        return cls.load(given, target)

    # -- on disk -----------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``; the folder is made."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        described = {
            "method": self.method,
            "format": _FORMAT,
            "target": dataclasses.asdict(self.fit),
            "config": dataclasses.asdict(self.config),
        }
        (place / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, place / WEIGHTS, {"format": "pt"})

    @classmethod
    def load(cls: type[L], folder: str | Path, target: TargetModel) -> L:
        """The module in a folder that ``save`` wrote, in the target's dtype and on its device, to draft with.

        Raises:
            OutpaceError: there is none, it is of another method or for a target of other sizes, or a tensor
                is missing, left over or of another shape; the message names it.
        """
        described = read_config(folder, cls.method)
        try:
            fit = Fit(**described["target"])
            config = cls.config_type(**{name: _frozen(v) for name, v in described["config"].items()})
            made = cls(config, fit)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise OutpaceError(f"{folder}: {CONFIG} is not one of {cls.method}: {error!r}") from error
        made.bind(target)
        made.take(_read_weights(folder), str(folder))
        made.requires_grad_(False).eval()
        return made.to(device=target.hidden.device, dtype=target.hidden.dtype)

    def take(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Copy weights in, one for each of its own.

        Raises:
            OutpaceError: a tensor is missing, left over or of another shape; the message names it.
        """
        place = f"{where} ({self.method} for {self.fit.name})"
        own = self.state_dict()
        for name, tensor in own.items():
            if name not in tensors:
                raise OutpaceError(f"{place}: there is no tensor {name!r}, of shape {list(tensor.shape)}")
            if tensors[name].shape != tensor.shape:
                raise OutpaceError(
                    f"{place}: tensor {name!r} has shape {list(tensors[name].shape)}, and by {CONFIG} it "
                    f"should have {list(tensor.shape)}"
                )
        left = sorted(tensors.keys() - own.keys())
        if left:
            shape = list(tensors[left[0]].shape)
            raise OutpaceError(f"{place}: tensor {left[0]!r}, of shape {shape}, has no place by {CONFIG}")
        self.load_state_dict(dict(tensors))


def read_config(folder: str | Path, method: str) -> dict[str, Any]:
    """What ``config.json`` in a folder says.

    Raises:
        OutpaceError: there is no such file, or it is of another method or format.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise OutpaceError(
            f"{method}: there is no {path}; train one with: outpace train {method} --model MODEL "
            f"--data FILE --out {folder}"
        )
    try:
        described: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OutpaceError(f"{path} is not JSON: {error}") from error
    found = described.get("method") if isinstance(described, dict) else None
    if found != method:
        raise OutpaceError(f"{path} is of the method {found!r}, not {method!r}; name the drafter {found}")
    if described.get("format") != _FORMAT:
        raise OutpaceError(
            f"{path} has format {described.get('format')!r}, and this version reads {_FORMAT}; train it anew"
        )
    return dict(described)


def _read_weights(folder: str | Path) -> dict[str, Tensor]:
    path = Path(folder) / WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise OutpaceError(f"{path} cannot be read: {error}") from error


def _frozen(value: Any) -> Any:
    """Lists, as JSON has them, as the tuples they were."""
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value

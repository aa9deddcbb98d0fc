"""What a target may offer beside forwards and variants, by topic; each refuses unless it is overridden."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.cache import Cache
from outpace.core import OutpaceError, Promise, Source
from outpace.targets.hardware import hardware
from outpace.targets.plan import StepPlan
from outpace.targets.rows import HiddenStates, Reading


class Described:
    """What a target says of its model: its name, and what is exact."""

    vocabulary: int
    model: Any
    plan: StepPlan
    quantised: str

    @property
    def name(self) -> str:
        """The model's name or path, otherwise its class."""
        if self.model is None:
            return type(self).__name__
        return str(self.model.name_or_path or type(self.model).__name__)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights and logits; float32 without a model."""
        dtype: torch.dtype = torch.float32 if self.model is None else self.model.dtype
        return dtype

    @property
    def file_type(self) -> str:
        """Type of the weights in a GGUF file, by llama.cpp's name; empty for other models."""
        return ""

    @property
    def bit_exact(self) -> bool:
        """True if a row's logits are bit-identical in plain decoding and in any forward.

        With any number of rows, any tree, any other sequences, any number of threads, and after any chunks of
        the prompt.
        """
        return self.plan.exact

    @property
    def why_inexact(self) -> str | None:
        """The reason why it is not bit-exact; None if it is."""
        return self.plan.why_inexact

    @property
    def coarse(self) -> bool:
        """True if it computes with fewer bits than float32's, so that near-ties are common."""
        half = self.dtype not in (torch.float32, torch.float64)
        return half or bool(self.quantised) or self.file_type not in ("", "F32")

    @property
    def promise(self) -> Promise:
        """The tokens of ``match`` beside plain decoding with this target; see docs/concepts/exactness.md.

        "same bits": of every logit. "same tokens": sums differ in float64's last bits. "same tokens but for
        near-ties": sums differ in float32's last bits. "not exact": they differ in those of a smaller type,
        where the two best tokens are often that near; ``why_inexact`` is the reason.
        """
        if self.bit_exact:
            return "same bits"
        if self.coarse:
            return "not exact"
        return "same tokens" if self.dtype == torch.float64 else "same tokens but for near-ties"

    @property
    def layers(self) -> int:
        """Number of layers, counted as in ``Output.hidden`` and ``some_layers``.

        Raises:
            OutpaceError: the number is not known.
        """
        raise OutpaceError(
            f"{kind_of(self)} does not state how many layers it has; name those to read, or use another "
            "drafter"
        )

    @property
    def identity(self) -> str:
        """Key of measured costs: architecture, size, dtype, device and threads."""
        model = self.model
        if model is None:
            return f"{type(self).__name__}, {self.vocabulary} token ids"
        weights = list(model.parameters())
        devices = {weight.device for weight in weights if not weight.is_meta}  # without released ones
        machine = [*sorted(map(str, devices)), *hardware(devices)]
        dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
        numbers = sum(weight.numel() for weight in weights)
        return ", ".join([type(model).__name__, f"{numbers} parameters", *dtypes, *machine])


class TakesSources(Described):
    """What a sequence is decoded from beside its prompt: a source for an encoder, or images."""

    has_encoder: ClassVar[bool]
    start: tuple[int, ...]

    def encode(self, source: Any) -> Source | None:
        """The source of a request, checked and encoded; None where there is none.

        Raises:
            OutpaceError: a source for a model without an encoder, none for a model with one, or a wrong one.
        """
        if source is not None:
            raise OutpaceError("this model has no encoder and takes no source; put the text into the prompt")
        return None

    def row_keys(self, tokens: Sequence[int], source: Source | None) -> Sequence[Hashable] | None:
        """Keys of a text's rows: those of two texts are equal if all their keys up to them are.

        None if rows depend on more of the source than keys can say, so that they cannot be shared.
        """
        return tokens if source is None else None

    def parts(self, tokens: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """The prompt and the source of a request for a text, given as token ids.

        Without an encoder the text is the prompt. Otherwise it is the source, and the prompt is ``start``.

        Raises:
            OutpaceError: the config of a model with an encoder lacks the token that its decoder starts with.
        """
        if not self.has_encoder:
            return list(tokens), None
        if not self.start:
            raise OutpaceError(f"{self.name} has no decoder_start_token_id in its config; set it there")
        return list(self.start), list(tokens)


class SharesParts:
    """Parts of the model that drafters read, or train through."""

    @property
    def hidden(self) -> HiddenStates:
        """Size, dtype and device of its hidden states.

        Raises:
            OutpaceError: it does not expose them.
        """
        raise OutpaceError(f"{kind_of(self)} shares no hidden states; use a drafter without trained parts")

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of token ids: [...] -> [..., hidden size]. Gradients do not reach its weights.

        Raises:
            OutpaceError: it does not expose them.
        """
        raise OutpaceError(f"{kind_of(self)} shares no embeddings; use a drafter without trained parts")

    def head(self, states: Tensor) -> Tensor:
        """Logits of outputs of the last layer: [..., hidden size] -> [..., vocabulary].

        Gradients reach the states, if the caller's grad mode records them.

        Raises:
            OutpaceError: it does not expose its head.
        """
        raise OutpaceError(f"{kind_of(self)} shares no head; use a drafter without trained parts")

    def through(
        self,
        states: Tensor,
        positions: Tensor,
        seen: Tensor,
        hidden_layers: Sequence[int] = (),
        weights: Mapping[str, Tensor] | None = None,
    ) -> Reading:
        """Run a forward without a cache, with gradients to its inputs.

        Args:
            states: input of the first layer, [B, N, hidden size].
            positions: [B, N].
            seen: the rows that each row attends to, [B, N, N], boolean.
            hidden_layers: layers whose hidden states to return.
            weights: weights by name, instead of the model's own; gradients reach these too.

        Raises:
            OutpaceError: the target cannot be trained through.
        """
        raise OutpaceError(f"{kind_of(self)} cannot be trained through; use another method")

    def read(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Logits [B, N, vocabulary] of a forward without a cache, with gradients to its weights.

        Args:
            tokens, positions: [B, N].
            seen: the rows that each row attends to, [B, N, N], boolean.

        Raises:
            OutpaceError: the target cannot be trained.
        """
        raise OutpaceError(f"{kind_of(self)} cannot be trained; use a transformers model")


class RunsPrograms:
    """Forwards of fixed shapes, which a GPU replays."""

    def shapes_beside(self) -> Any:
        """``FixedShapes`` for a drafter's own module, if its own steps have fixed shapes; otherwise None."""
        return None

    def plays(self, count: int, width: int = 1) -> bool:
        """True if ``play`` runs forwards over this number of slots, and of rows for each."""
        return False

    def play(self, cache: Cache, program: Any) -> bool:
        """Run a ``Program`` (``targets/gpu/fixed.py``), as one graph per lane where there are graphs.

        Returns:
            False if it has to be done in single forwards: a program of this model cannot be captured.

        Raises:
            CacheFull: the cache has no room for the rows. OutpaceError: the target does not do that.
        """
        raise OutpaceError(f"{kind_of(self)} runs single forwards only")

    def warm(self, cache: Cache, slots: int, layers: Sequence[int]) -> None:
        """Prepare steps, so that no request waits for it; by default there is nothing to prepare.

        Args:
            cache: a cache made by ``new_cache``, of which no slot is in use.
            slots: maximum number of sequences of a step.
            layers: the layers whose hidden states steps return.
        """
        del cache, slots, layers


def kind_of(target: Any) -> str:
    return f"a target of the class {type(target).__name__}"

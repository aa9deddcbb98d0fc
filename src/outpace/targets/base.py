"""The interface of a target: a cache, a forward, a context length, a vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from outpace.cache import Cache, Slot
from outpace.core import OutpaceError, Promise, Source, UnsupportedModel
from outpace.targets.batch import Batch
from outpace.targets.hardware import hardware
from outpace.targets.plan import StepPlan
from outpace.targets.rows import HiddenStates, Output, Reading
from outpace.tree import is_chain


class TargetModel(ABC):
    """A model that can verify drafts.

    Attributes:
        vocabulary: number of token ids.
        context: maximum number of positions; None for no limit.
        eos_token_ids: tokens that end a sequence.
        start: initial tokens of an encoder-decoder model's prompt, if its config has them, with the token
            that it forces after the first.
        model: the underlying transformers model; None if there is none.
        device: device of its input tokens; the CPU by default.
        extra: number of ids beyond the vocabulary that it accepts; see ``with_embeddings``.
        plan: which step runs, what was passed over and why, and the layouts of the forwards that ran.
        quantised: "int8", "int4" or "int4 and int8" if the weights of linear layers were rounded to it on
            loading or in their checkpoint; otherwise empty.
        stock: steps run on a transformers model's own modules, and prompts are to be read in one forward, so
            that plain decoding has the bits of its generate().
        max_leaves: maximum number of leaves of the drafts in a forward, over all sequences; None for no
            limit.
        why_chains_only: reason why it verifies chains but no trees; None if it verifies trees. It then
            decodes sequences one after another: a step of n sequences takes n forwards.
        tokenizer: the tokenizer that comes with the model, if any.
        shares_ids: the tokens of an encoder-decoder model's sources are ids of its vocabulary.
        tells: it returns the target's own tokens at ``Batch.asked`` instead of logits.
        mixes: rows of prompts in a forward of other sequences' drafts cost little more than alone.
        prompts_differ: a row has other bits as a row of a prompt than in a step. So that no token depends on
            chunks, preemption or shared prefixes, ``Batch.prompts`` is obeyed, rows of prompts are fed
            in forwards without drafts, and only they are shared.
        prompt_step: rows of prompts are fed up to multiples of this, or to a prompt's end.
        state_bytes: bytes that a sequence needs beside its rows, and each node of a draft until it is kept.
        seconds: number of rows of one sequence -> seconds of their forward, measured by the self-test; empty
            if it did not measure them. A governor begins with them.

    Class attributes:
        has_encoder: a text is decoded from a source in addition to its prompt.
    """

    has_encoder: ClassVar[bool] = False

    vocabulary: int
    context: int | None
    eos_token_ids: frozenset[int]
    start: tuple[int, ...] = ()
    model: Any = None
    device: torch.device = torch.device("cpu")
    extra: int = 0
    plan: StepPlan = StepPlan()
    quantised: str = ""
    stock: bool = False
    max_leaves: int | None = None
    why_chains_only: str | None = None
    tokenizer: Any = None
    shares_ids: bool = True
    tells: bool = False
    mixes: bool = False
    prompts_differ: bool = False
    prompt_step: int = 1
    state_bytes: int = 0
    seconds: Mapping[int, float] = MappingProxyType({})

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
            f"{_kind(self)} does not state how many layers it has; name those to read, or use another drafter"
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

    @abstractmethod
    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> Cache:
        """Make a cache for this model.

        Args:
            slots: number of slots to make room for.
            length: rows per slot to make room for; both grow, unless the cache is static.
            capacity: maximum total number of reserved rows; None for no limit.
        """

    @property
    def hidden(self) -> HiddenStates:
        """Size, dtype and device of its hidden states.

        Raises:
            OutpaceError: it does not expose them.
        """
        raise OutpaceError(f"{_kind(self)} shares no hidden states; use a drafter without trained parts")

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of token ids: [...] -> [..., hidden size]. Gradients do not reach its weights.

        Raises:
            OutpaceError: it does not expose them.
        """
        raise OutpaceError(f"{_kind(self)} shares no embeddings; use a drafter without trained parts")

    def head(self, states: Tensor) -> Tensor:
        """Logits of outputs of the last layer: [..., hidden size] -> [..., vocabulary].

        Gradients reach the states, if the caller's grad mode records them.

        Raises:
            OutpaceError: it does not expose its head.
        """
        raise OutpaceError(f"{_kind(self)} shares no head; use a drafter without trained parts")

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
        raise OutpaceError(f"{_kind(self)} cannot be trained through; use another method")

    def read(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Logits [B, N, vocabulary] of a forward without a cache, with gradients to its weights.

        Args:
            tokens, positions: [B, N].
            seen: the rows that each row attends to, [B, N, N], boolean.

        Raises:
            OutpaceError: the target cannot be trained.
        """
        raise OutpaceError(f"{_kind(self)} cannot be trained; use a transformers model")

    def release(self) -> bool:
        """Free those of the model's own weights of which steps have copies, except the head's.

        The model can then neither be run nor trained, only decoded through this target.

        Returns:
            False if there are none: then the model is as it was.
        """
        return False

    def revision(self) -> int:
        """A number that is another once weights have changed, so that rows computed before are stale.

        Raises:
            OutpaceError: this target no longer fits its model.
        """
        return 0

    def replaced(self) -> str | None:
        """The reason why this target no longer fits its model, whatever its weights; None if it does."""
        return None

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

    def open(self, cache: Cache, source: Source | None = None, rows: int = 0) -> Slot:
        """Take a slot of the cache into use for a sequence, with its source if the model has an encoder.

        ``cache.free(slot)`` releases it, including the source's data.

        Args:
            cache: a cache made by ``new_cache``.
            rows: rows to make room for; 0 for the cache's initial length.

        Raises:
            CacheFull: too few rows are left.
        """
        return cache.allocate(rows)

    def some_layers(self, layers: Sequence[int]) -> TargetModel:
        """This model with only some of its layers, counted from 0, in ascending order.

        It shares the weights, and uses this target's caches: it writes rows of those layers, and reads the
        rows computed by all layers.

        Raises:
            OutpaceError: a layer does not exist. UnsupportedModel: the model is not a plain stack of layers.
        """
        raise UnsupportedModel(
            f"a {type(self).__name__} is not a plain stack of layers, so none of them can be left out; use "
            "another drafter"
        )

    def over_window(self, sinks: int, recent: int) -> TargetModel:
        """This model, whose rows attend to the first committed rows and the most recent ones alone.

        Positions are those of the whole text. It shares the weights, and uses this target's caches.

        Args:
            sinks: number of the first ones, at least 1.
            recent: number of the most recent ones.

        Raises:
            UnsupportedModel: the target's attention knows no such mask.
        """
        raise UnsupportedModel(
            f"a {type(self).__name__} cannot attend to a part of its committed rows; use another drafter"
        )

    def rounded(self, bits: int = 4) -> TargetModel:
        """This model with rounded weights, which drafts in this target's caches after committed rows.

        It follows changes of this target's weights. Its rows are to be dropped before this target continues.

        Args:
            bits: of the weights, 8 or 4.

        Raises:
            UnsupportedModel: there is none; the message has the reason.
        """
        raise UnsupportedModel(f"{_kind(self)} has no rounded self; use another drafter, as suffix")

    def rounded_costs(self) -> tuple[float, float]:
        """Estimates, by a short trial, of what drafting with ``rounded`` costs, in plain steps.

        Returns:
            The time of a forward over five rows of this target, and that of a row with rounded weights.

        Raises:
            UnsupportedModel: there is no rounded self; the message has the reason.
        """
        raise UnsupportedModel(f"{_kind(self)} has no rounded self")

    def with_embeddings(self, table: Tensor | int) -> TargetModel:
        """This model, extended by token ids beyond its vocabulary: rows of a table of embeddings.

        Id ``vocabulary + i`` is row i. Otherwise it equals this target, and it uses this target's caches.

        Args:
            table: [n, hidden size], read again in each forward; or a number n, for n copies of the mean of
                the model's embeddings.

        Raises:
            OutpaceError: the table has the wrong size. UnsupportedModel: the model does not accept
            embeddings.
        """
        raise UnsupportedModel(
            f"a {type(self).__name__} takes no embeddings in place of token ids; use another drafter"
        )

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
        raise OutpaceError(f"{_kind(self)} runs single forwards only")

    def warm(self, cache: Cache, slots: int, layers: Sequence[int]) -> None:
        """Prepare steps, so that no request waits for it; by default there is nothing to prepare.

        Args:
            cache: a cache made by ``new_cache``, of which no slot is in use.
            slots: maximum number of sequences of a step.
            layers: the layers whose hidden states steps return.
        """
        del cache, slots, layers

    @abstractmethod
    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        """Compute a batch of slots of a cache made by ``new_cache``.

        The new rows are after the committed ones until ``cache.keep`` closes the forward.

        Args:
            batch: at least one row.
            hidden_layers: layers whose hidden states to return.

        Raises:
            CacheFull: the cache has no room for the rows. OutpaceError: the cache is another target's.
        """


Checked = TypeVar("Checked", bound=Cache)


def checked_cache(target: TargetModel, cache: Cache, kind: type[Checked]) -> Checked:
    """The cache, checked to be of the class of a target's caches.

    Raises:
        OutpaceError: it is not this target's.
    """
    if not isinstance(cache, kind):
        raise OutpaceError(f"{_kind(target)} needs a cache of its own: target.new_cache()")
    return cache


def check_chains(target: TargetModel, batch: Batch) -> None:
    """Refuse trees for a target that takes chains only.

    Raises:
        OutpaceError: some rows branch.
    """
    if target.why_chains_only and not all(is_chain(row.tree) for row in batch.rows.values()):
        raise OutpaceError(
            f"{target.name} takes chains only, since {target.why_chains_only}; use a drafter of chains"
        )


def _kind(target: TargetModel) -> str:
    return f"a target of the class {type(target).__name__}"

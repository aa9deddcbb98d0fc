"""The interface of a target: a cache, a forward, a context length, a vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from outpace.cache import Cache, Slot
from outpace.core import OutpaceError, Source, UnsupportedModel
from outpace.targets.batch import Batch
from outpace.targets.capabilities import RunsPrograms, SharesParts, TakesSources, kind_of
from outpace.targets.plan import StepPlan
from outpace.targets.rows import Output
from outpace.tree import is_chain


class HasVariants:
    """Other targets of the same model, which use this target's caches."""

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
        raise UnsupportedModel(f"{kind_of(self)} has no rounded self; use another drafter, as suffix")

    def rounded_costs(self) -> tuple[float, float]:
        """Estimates, by a short trial, of what drafting with ``rounded`` costs, in plain steps.

        Returns:
            The time of a forward over five rows of this target, and that of a row with rounded weights.

        Raises:
            UnsupportedModel: there is no rounded self; the message has the reason.
        """
        raise UnsupportedModel(f"{kind_of(self)} has no rounded self")

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


class TargetModel(TakesSources, SharesParts, HasVariants, RunsPrograms, ABC):
    """A model that can verify drafts: it makes caches, and computes batches of rows over them.

    What else it may offer stands in ``capabilities.py``.

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

    @abstractmethod
    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> Cache:
        """Make a cache for this model.

        Args:
            slots: number of slots to make room for.
            length: rows per slot to make room for; both grow, unless the cache is static.
            capacity: maximum total number of reserved rows; None for no limit.
        """

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
        raise OutpaceError(f"{kind_of(target)} needs a cache of its own: target.new_cache()")
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

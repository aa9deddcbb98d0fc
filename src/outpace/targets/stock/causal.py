"""Stock decoder-only transformers models: their forward and their cache.

Nothing is patched: a forward gets a 4-D mask, explicit positions and outpace's cache object.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.cache import Cache, FixedCache, KVCache, Slot, StaticCache
from outpace.core import OutpaceError, Source, TargetOptions, UnsupportedModel
from outpace.native.pool import follow_torch
from outpace.targets.base import TargetModel, check_chains, checked_cache
from outpace.targets.batch import Batch
from outpace.targets.cpu.kernels import QUANTISED
from outpace.targets.cpu.linear import rounded_of
from outpace.targets.cpu.packing import check_quantise
from outpace.targets.cpu.trials import settled_threads
from outpace.targets.gpu.fixed import FixedShapes, most_bytes, resolved
from outpace.targets.gpu.graphs import runner_for
from outpace.targets.gpu.tree_attention import with_trees
from outpace.targets.inputs.changes import Addresses, Structure, WatchedWeights
from outpace.targets.inputs.config import context_of, end_tokens, family, size_in, takes_no_tree
from outpace.targets.inputs.forward import device_of
from outpace.targets.inputs.mapped import FileMemory
from outpace.targets.inputs.refusals import check_stock, refuse_by_config, refuse_training, why_chains_only
from outpace.targets.inputs.versions import warn_of_untested
from outpace.targets.plan import StepPlan
from outpace.targets.rows import Output, extra_rows
from outpace.targets.step.agreement import agree
from outpace.targets.step.bit_test import why_bits_differ
from outpace.targets.step.flat import why_not_flat
from outpace.targets.step.layer_test import compare_all
from outpace.targets.step.modules import Modules
from outpace.targets.step.plans import StepRequest, choose
from outpace.targets.step.record import Record, answer
from outpace.targets.step.reference import StockModel
from outpace.targets.step.replay import shown
from outpace.targets.step.self_test import tested
from outpace.targets.step.trees import give_trees, why_disproved
from outpace.targets.stock.forwards import StockForwards
from outpace.targets.stock.rounded import RoundedTarget, costs_of
from outpace.targets.stock.uncached import scale_of
from outpace.transfer import upload


class CausalTarget(StockForwards):
    """A decoder-only transformers model.

    Construction runs several forwards over a few dozen tokens, to determine the shape of the cache, and to
    test that a tree has the logits of its paths, and whether bit for bit. The model is unchanged.

    Its steps may run on a copy of its modules, with the same weights. On a CPU: with packed linear layers
    (``cpu/linear.py``), and a bit-exact attention (``cpu/exact_attention.py``). A model with FlashAttention
    or flex attention, which do not support tree masks, runs on ``tree_attention``. On a CUDA device forwards
    with branches run on it by default (``step/trees.py``).

    Weights may change. Writes that torch counts take effect in the next forward, all others (through
    ``.data`` or NumPy, by an optimiser with ``fused=True``, a parameter or its memory replaced) when the next
    text begins: of each weight that steps hold, one number in 8,192 (of a small one 64, of a bias or a norm
    all) is then compared with the model's. An uncounted write that misses these, as one to a few rows may,
    is not seen: call ``renew`` after it. Modules that are replaced, wrapped by adapters or given hooks later,
    and numbers or functions that are set on them, are refused when a text begins, unless steps run the model
    itself and these are no numbers of the model's own: make a new target. So are settings of its config.

    Args:
        model: a loaded model in evaluation mode, on one device or spread over several.
        options: fields of ``TargetOptions``, by name.

    Attributes:
        options: these.
        released: some of the model's own weights were freed.

    Raises:
        UnsupportedModel: named by family, with the reason.
        OutpaceError: an unknown value of an option; options that do not go together.
    """

    _is_part = False  # some layers of another target
    _keeps_states = False  # besides keys and values
    _modules: Modules
    _given: Structure | None  # of the model that was given, if steps are made from a copy of it
    _table: Tensor  # embeddings of ids beyond the vocabulary, if any
    _never_fixed = ""  # why its forwards have no fixed shapes, unless these are asked for
    _never_trees: str | None = None  # why forwards with branches run on the model's own attention
    _never_flat: str | None = None  # why its forwards are padded
    _no_graphs: str
    _needs_weights = False  # so that they cannot be freed
    not_rounded = ""  # why it has no rounded self
    _others: WatchedWeights | None = None  # those that steps do not hold, once ``revision`` was asked for
    _revision = 0
    _rounded_costs: tuple[float, float] | None = None  # once they were asked for

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.options = TargetOptions.of(options, "Target()")
        warn_of_untested()
        refuse_by_config(model, states=self._keeps_states)
        check_quantise(model, self.options.quantise)
        self.stock, self.quantised = self.options.stock, _rounding(model, self.options.quantise)
        if self.stock:
            check_stock(model)
        self.why_chains_only = why_chains_only(model, states=self._keeps_states)
        if self.why_chains_only and self.options.static is True:
            raise _only_chains(model, self.why_chains_only)
        self.model = self._prepared(model)
        self._given = None if self.model is model else Structure(model)
        model, config = self.model, self.model.config.get_text_config(decoder=True)
        self.context = context_of(config)
        self.eos_token_ids = end_tokens(model)
        self.device = device_of(model.get_input_embeddings())
        devices = {weight.device for weight in model.parameters()}
        never = self._never_fixed or self.why_chains_only or ""
        self.options, self._no_graphs = resolved(self.options, devices, never)
        self._hidden_size = size_in(config, "hidden_size", model)
        self._scale = scale_of(config)
        self._trial, self._rounded = RLock(), dict[int, RoundedTarget]()
        self._choose()

    def _prepared(self, model: Any) -> Any:
        """The model that steps are made from: the one given, or a copy that takes trees."""
        if self.why_chains_only or not takes_no_tree(model.config.get_text_config(decoder=True)):
            return model
        return with_trees(model)

    def _choose(self) -> None:
        """Choose the modules that steps run on, and test them."""
        if self.device.type == "cpu":
            settled_threads()
        asked, check = self.options, self.options.check
        about = {**asked.of_step, "static": asked.static}
        record = Record.of_model(self.model, about) if check == "auto" else None
        self.plan = StepPlan()
        self._asked = StepRequest(self.model, asked, bool(self.why_chains_only))
        self._plan, modules, plan = choose(self._asked, partial(self._why_inexact, record))
        self.plan = replace(plan, no_graphs=self._no_graphs if self.device.type == "cuda" else "")
        self._take(modules)
        if asked.static:
            caches = {shape.keys.device for shape in self._modules.shapes}
            devices = caches | {weight.device for weight in self.model.parameters()}
            runner = asked.runner or runner_for(self.device, devices)
            self._fixed = FixedShapes(runner, most_bytes(self.device))
            self._addresses = Addresses(self.model.modules())
            if check and self.bit_exact and (reason := self._tested_bits(record)):
                raise UnsupportedModel(f"{family(self.model)} is not bit-exact: {reason}; leave exact out")
        if check:
            step, make = self._modules.step, partial(self._unchecked, **asked.of_step)
            answer(record, "steps", step, lambda: self._tested_steps(make))
        if self.device.type == "cuda":
            self._choose_trees(record)
        elif modules.native is None:
            self._choose_flat(record)
        if self._modules.native is not None:
            FileMemory().drop(self.model.parameters())
        self.plan.layouts.clear()  # those of the tests

    def _why_inexact(self, record: Record | None, modules: Modules) -> str | None:
        """The reason why steps on these modules are not bit-exact; None if they are, or if it is known."""
        # Without a check it is known to pass; fixed shapes are tested when they exist.
        if self.options.static or not (self.options.check or self.options.exact is not True):
            return None
        self._take(modules)
        if reason := self._tested_bits(record):
            del self._modules  # its copies of weights are not to count as used memory
        return reason

    def _tested_bits(self, record: Record | None) -> str | None:
        step = self._modules.step
        question = "bits of fixed shapes" if self._fixed else "bits"
        return answer(record, question, step, lambda: why_bits_differ(self._stand_in(), step, self._embedded))

    def _tested_steps(self, make: Callable[..., TargetModel]) -> None:
        """Run the self-test."""
        part = self._stand_in()
        tested(part, part.reference(), make, self.model)
        if part is not self:
            compare_all(self, StockModel(self.model, _run, self._unchecked, self._embedded, (self.model,)))

    def _stand_in(self) -> CausalTarget:
        """The target that is tested: of the layers that stand for all, so that a test costs no more for more.

        The target itself where its layers do not run in C, which has one form for all of a kind, or are no
        plain stack.
        """
        if self._modules.native is not None and len(numbers := shown(self.model)) < self.layers:
            with suppress(UnsupportedModel):  # the first two, since targets are made of a copy of these
                return self.some_layers(sorted({*numbers, 1}))
        return self

    def _choose_trees(self, record: Record | None) -> None:
        """Run forwards with branches on a copy of the step for them, if it passes the self-test."""
        reason = give_trees(self._asked, self._modules, self._never_trees)
        if not reason and self.options.check and (copied := self._modules.trees) is not None:
            reason = answer(record, "trees", copied.step, lambda: why_disproved(self, self.reference()))
        self._no_trees(reason or "")

    def _choose_flat(self, record: Record | None) -> None:
        """Run forwards that would pad rows on a copy of the step without padding, if that passes its test."""
        modules, reason = self._modules, self._never_flat
        if self._runs_model:
            reason = "steps run the model itself"
        elif not self.options.check:
            reason = "it was not tested"
        reason = reason or answer(record, "flat", modules.step, lambda: why_not_flat(self, self._embedded))
        modules.flat = None if reason else modules.with_flat()
        self.plan = replace(self.plan, no_flat=reason or "")

    def _no_trees(self, reason: str) -> None:
        """Run all forwards on the model's own attention, for a reason, if there is one."""
        if reason:
            self._modules.trees = None
        self.plan = replace(self.plan, no_trees=reason)

    def release(self) -> bool:
        if not (self.released or self._needs_weights):
            self.released = self._modules.release()
        return self.released

    def _take(self, modules: Modules) -> None:
        """Run steps on these modules."""
        self._modules, self.vocabulary = modules, modules.vocabulary

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return self._modules.native is not None or self._modules.flat is not None

    def renew(self) -> None:
        """Copy the model's weights again, as is done when they are seen to have changed.

        Raises:
            OutpaceError: this target is a subset of another's layers, the weights of others were released, or
                the model has another dtype or other modules.
        """
        if (reason := self.replaced()) is not None:
            raise OutpaceError(reason)
        if self._is_part or self.released:
            raise OutpaceError("the model's weights were modified; make a new target and engine")
        modules = self._plan.make(self._asked)
        modules.trees = self._modules.trees and modules.with_trees()
        modules.flat = self._modules.flat and modules.with_flat()
        self._take(modules)
        self._others = None  # so that the revision is another
        if self._fixed is not None:
            self._fixed.drop()
            self._addresses = Addresses(self.model.modules())

    def replaced(self) -> str | None:
        reason = None if self._given is None else self._given.changed()
        return reason or self._modules.structure.changed(modules=not self._runs_model)

    @property
    def _runs_model(self) -> bool:
        """True if steps run the model itself, so that they follow its modules."""
        own = self._modules.step is self.model and self._modules.native is None
        return own and self._fixed is None and not self._is_part

    def keep_modules(self) -> None:
        """Accept changes of the model's modules that change none of its outputs."""
        if self._given is not None:
            self._given.accept()
        self._modules.structure.accept()

    def revision(self) -> int:
        self.follow(begins=True)
        if self._others is None or self._others.changed(thorough=True):
            self._others = WatchedWeights(self._modules.live())
            self._revision += 1
        return self._revision

    def follow(self, begins: bool) -> None:
        """Follow changes of the model.

        Args:
            begins: a text begins, so look for those that are not counted too.

        Raises:
            OutpaceError: as ``renew``.
        """
        if begins and (reason := self.replaced()) is not None:
            raise OutpaceError(reason)
        if begins and self._runs_model and self._modules.structure.changed() is not None:
            self._modules.structure.accept()
            self._others = None  # so that the revision is another
            for part in self._rounded.values():
                part.stale = True
            if self._modules.trees is not None:
                self._no_trees("modules of the model were replaced since it was tested")
        moved = begins and self._addresses is not None and self._addresses.moved()
        if moved or self._modules.changed(begins):
            self.renew()
        for part in self._rounded.values() if begins else ():
            part.look()

    @property
    def _embedded(self) -> int:
        """Number of token ids that have an embedding."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def identity(self) -> str:
        layouts = [
            f"{kernel} weights" if kernel in QUANTISED else f"packed by {kernel}"
            for kernel in self.plan.packed
        ]
        if self.plan.native:
            layouts.append("native")
        return ", ".join([super().identity, *layouts, *(["bit-exact"] if self.bit_exact else [])])

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> KVCache:
        kinds: dict[Any, type[KVCache]] = {True: StaticCache, False: KVCache, "auto": FixedCache}
        return kinds[self.options.static](self._modules.shapes, slots, length, capacity)

    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        return self.run(cache, batch, hidden_layers, self._first_states(cache, batch))

    @torch.inference_mode()
    def run(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
        states: Mapping[Slot, Tensor] | None = None,
    ) -> Output:
        """``forward``, optionally with the first layer's inputs instead of tokens.

        Args:
            states: slot -> [its rows, hidden size], instead of the tokens' embeddings; the tokens are then
                ignored.
        """
        refuse_training(self.model)
        check_chains(self, batch)
        kv = checked_cache(self, cache, KVCache)
        follow_torch()
        self.follow(begins=not all(map(kv.length, batch.slots)))
        if (runner := self._modules.native) is not None:
            inputs = None if states is None else torch.cat([states[slot] for slot in batch.slots])
            output = runner.run(kv, batch, self._modules.cache_layers, tuple(hidden_layers), inputs)
            self.plan.layouts["flat"] += 1
            return output
        return self._run_stock(kv, batch, tuple(hidden_layers), states)

    def _twin(self) -> CausalTarget:
        """Make a copy whose model or embeddings can be replaced."""
        found = copy.copy(self)
        found.plan = replace(self.plan, layouts=Counter())
        found._fixed = self._fixed and self._fixed.anew()
        found._rounded = {}
        return found

    @property
    def layers(self) -> int:
        return size_in(self.model.config.get_text_config(decoder=True), "num_hidden_layers", self.model)

    def some_layers(self, layers: Sequence[int], bare: bool = False) -> CausalTarget:
        """See ``TargetModel``. With ``bare``, norm and head are omitted: the logits are hidden states."""
        part = self._twin()
        part._is_part, part._bare = True, bare
        part._modules = self._modules.some_layers(layers, bare)
        part.model = part._modules.model
        return part

    def over_window(self, sinks: int, recent: int) -> CausalTarget:
        if self.options.static is True:
            raise UnsupportedModel("a target of fixed shapes has no windows of its cache; leave static out")
        return self.on_modules(self._modules.over_window(sinks, recent))

    def on_modules(self, modules: Modules) -> CausalTarget:
        """This target with other modules, which uses its caches."""
        part = self._twin()
        part._is_part, part._fixed, part._modules = True, None, modules
        return part

    def rounded(self, bits: int = 4) -> RoundedTarget:
        with self._trial:  # engines of several threads share one
            if bits not in self._rounded:
                self._rounded[bits] = RoundedTarget(self, bits)
            return self._rounded[bits]

    def rounded_costs(self) -> tuple[float, float]:
        with self._trial:
            if self._rounded_costs is None:
                self._rounded_costs = costs_of(self)
            return self._rounded_costs

    def with_embeddings(self, table: Tensor | int) -> CausalTarget:
        embeddings: Any = self.model.get_input_embeddings()
        found = self._twin()
        found._table = extra_rows(embeddings.weight, table)
        found.extra = len(found._table)
        answers = []
        # The second row makes ``found`` use embeddings; the first does not attend to it.
        for target, ids in ((found, [1, self.vocabulary]), (self, [1, 1]), (self, [1])):
            cache = target.new_cache(length=4)
            slot = cache.allocate()
            answers.append(target.forward(cache, Batch.of({slot: ids})).logits_of(slot)[:1].clone())
        if not agree(*answers):
            raise UnsupportedModel(
                f"{family(self.model)} gives other logits when given embeddings in place of token ids; "
                "use another drafter"
            )
        return found

    @torch.inference_mode()
    def _first_states(self, cache: Cache, batch: Batch) -> dict[Slot, Tensor] | None:
        """Inputs of the first layer by slot, [rows, hidden size]; None if all are the tokens' embeddings."""
        if not self.extra or bool((batch.tokens < self.vocabulary).all()):
            return None
        ids = upload(batch.tokens.tolist(), self.device)
        past = ids >= self.vocabulary
        states = self.embed(ids.masked_fill(past, 0))
        states[past] = self._table.to(states)[ids[past] - self.vocabulary]
        return dict(zip(batch.slots, states.split(batch.widths.tolist()), strict=True))

    def reference(self) -> StockModel:
        """The model that the self-test compares with."""
        step = self._modules.step
        model: Any = self.model
        if self.quantised:  # the rounded weights, with the model's own attention
            model = self._asked.rounded_model(model, self._attention)
        bare = partial(self._unchecked, plan="stock")
        same = partial(self._unchecked, plan=self.plan.name)
        unreplaced = self._runs_model or bool(self.quantised)
        parts, own = (self.model, step), None if unreplaced else same
        return StockModel(model, _run, bare, self._embedded, parts, own, wider=self._modules.trees is None)

    def _unchecked(self, model: Any, **options: Any) -> CausalTarget:
        """A target of another model, not tested."""
        found = type(self)(model, static=self.options.static, check=False, **options)
        if self._modules.trees is None:
            found._modules.trees = None
        return found

    @property
    def _attention(self) -> str:
        """The model's implementation of attention."""
        name: str = self.model.config.get_text_config(decoder=True)._attn_implementation
        return name


def _rounding(model: Any, quantise: str | None) -> str:
    """What weights of a model are rounded to, or are to be; empty for none."""
    found = {layer.kernel.name for layer in rounded_of(model)} | ({quantise} if quantise else set())
    return " and ".join(sorted(found))


def _run(model: Any, source: Source | None, ids: Tensor, **options: Any) -> Any:
    """A plain forward over texts [B, n]."""
    return model(input_ids=ids, use_cache=False, **options)


def _only_chains(model: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{family(model)} takes chains only, since {reason}; leave static out")

"""Stock decoder-only transformers models: their forward and their cache.

Nothing is patched: a forward gets a 4-D mask, explicit positions and outpace's cache object.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.cache import Cache, KVCache, Slot, StaticCache, Window
from outpace.core import OutpaceError, Source, UnsupportedModel
from outpace.targets.base import (
    HiddenStates,
    Output,
    Reading,
    Rows,
    TargetModel,
    check_chains,
    extra_rows,
    own_cache,
)
from outpace.targets.cpu.fused import fusing_refused
from outpace.targets.cpu.kernels import QUANTISED
from outpace.targets.cpu.line_attention import line_attention
from outpace.targets.cpu.linear import check_pack, check_quantise, packing_wanted, unproven
from outpace.targets.gpu.fixed import FixedInputs, FixedShapes, width_of
from outpace.targets.gpu.graphs import Made, Runner, runner_for
from outpace.targets.gpu.invariant import unproven_norm
from outpace.targets.inputs.changes import Places, Weights
from outpace.targets.inputs.config import context_of, end_tokens, family, runs_on_gpu, size_in, takes_no_tree
from outpace.targets.inputs.forward import CacheAdapter, device_of, inputs_of, padded, rows_of
from outpace.targets.inputs.line import WINDOW, Line, apart
from outpace.targets.inputs.masks import TREE, Mask, placed
from outpace.targets.inputs.refusals import (
    STOCK,
    check_stock,
    refuse_by_config,
    untouchable,
    why_chains_only,
    why_not_exact,
)
from outpace.targets.inputs.surgery import exchange
from outpace.targets.kernel import Kernel
from outpace.targets.step.bit_test import bit_test
from outpace.targets.step.plans import Modules
from outpace.targets.step.record import Record, answer
from outpace.targets.step.self_test import Stock, agree, tested

_log = logging.getLogger(__name__)


class CausalTarget(TargetModel):
    """A decoder-only transformers model.

    Construction runs several forwards over a few dozen tokens, to determine the shape of the cache, and to
    test that a tree has the logits of its paths, and whether bit for bit. The model is unchanged.

    Its steps may run on a copy of its modules, with the same weights. On a CPU: with packed linear layers
    (``packed.py``), and a bit-exact attention (``attention.py``). A model with FlashAttention or flex
    attention, which do not support tree masks, runs on ``tree_attention``.

    Weights may change. Writes that torch counts take effect in the next forward, all others (through
    ``.data`` or NumPy, by an optimiser with ``fused=True``, a parameter or its memory replaced) when the next
    text begins: of each weight that steps hold, one number in 8,192 (of a small one 64, of a bias or a norm
    all) is then compared with the model's. An uncounted write that misses these, as one to a few rows may,
    is not seen: call ``renew`` after it. Modules that are replaced, wrapped by adapters or given hooks later
    are refused when a text begins, unless steps run the model itself: make a new target.

    Args:
        model: a loaded model in evaluation mode, on one device or spread over several.
        static: fixed shapes, in a cache that does not grow: a forward with logits covers a power of two of
            slots, rows per slot and columns, up to 128 rows per slot and 512 in total; wider ones and those
            without logits (chunks of prompts) have only the width they need. On a CUDA device each shape is
            captured as a graph on first use, and then replayed.
        runner: runner of forwards of fixed shapes; None uses graphs if the model is on one CUDA device.
        compiled: options of ``torch.compile``, for the model in forwards of fixed shapes; None does not
            compile it.
        exact: make the logits of a row bit-identical for any number of rows, tree, other sequences, threads
            and chunks of the prompt. True refuses a model for which this fails; "auto" tries it on a CPU, for
            bfloat16 and float16, where near-ties would otherwise differ, and for fused layers; see
            ``bit_exact``. On a CPU all linear layers then use compiled products, unless ``pack`` is False.
            On a GPU linear layers, norms and attention then run on Triton kernels (``invariant.py``).
        pack: keep packed copies of the weights of linear layers, in addition to the model's. True refuses a
            model or a machine that does not support it; "auto" packs if it is faster, or makes the target
            bit-exact, and memory allows. A kernel's name ("compiled", "oneDNN", "FBGEMM float16") takes that
            one instead of the fastest, so that all processes have the same bits.
        fuse: run the layers' operations between matrix products as functions that are compiled on first use,
            with this machine's C compiler (``fused.py``), for families of Llama's structure in float32 or
            bfloat16 on a CPU. True refuses a model or a machine that does not support it; "auto" does it
            where it is supported, unless ``pack`` is False; see ``unfused``.
        quantise: round the weights of linear layers of a bfloat16 model on a CPU, in a copy: "int8" to 8
            bits with a scale per output; "int4" to 4 bits with a scale and a zero per output and 32 inputs
            (to 8 bits in the head, and if the inputs are not a multiple of 32 or the outputs not one of 16).
            Activations stay bfloat16. This changes tokens: they are those of plain decoding with the rounded
            weights.
        release: free the weights of the model's layers that have a packed or rounded copy, except the head.
            The model can then neither be run nor trained, only decoded through this target. True refuses a
            model without such layers; "auto" frees what there is; see ``released``.
        stock: run steps on the model's own modules, as exact=False, pack=False and fuse=False do, and let
            engines read a prompt in one forward. Under stock=True plain decoding of one prompt at a time has
            the bits of transformers' generate(); drafted rows have others (docs/concepts/exactness.md).
        check: run the self-test. "auto" does not repeat it where the user's cache has the answer for this
            model, these options and this machine (``record.py``); True always runs it. Disable it only for a
            model that has passed it.

    Raises:
        UnsupportedModel: named by family, with the reason.
        OutpaceError: options for fixed shapes without ``static``; an unknown value of an option; options that
            do not go with ``stock``.
    """

    _is_part = False  # some layers of another target
    _modules: Modules
    _packs_lines = True  # forwards of uneven rows may leave out the padding (``lines.py``)
    _line_untried = False  # the module for those is made and tested when first needed
    _mixes = False  # it takes those of several windows in one
    _table: Tensor  # embeddings of ids beyond the vocabulary, if any
    _fixed: FixedShapes | None = None
    _needs_weights = ""  # why the model's own weights cannot be freed
    _addresses: Places | None = None  # of all weights, which are in what ``_fixed`` has captured
    _others: Weights | None = None  # those that steps do not hold, once ``revision`` was asked for
    _revision = 0
    released = False  # some of the model's own weights were freed

    def __init__(
        self,
        model: PreTrainedModel,
        static: bool = False,
        check: bool | Literal["auto"] = "auto",
        runner: Runner | None = None,
        compiled: Mapping[str, Any] | None = None,
        exact: bool | Literal["auto"] = "auto",
        pack: bool | str = "auto",
        fuse: bool | Literal["auto"] = "auto",
        quantise: str | None = None,
        release: bool | Literal["auto"] = False,
        stock: bool = False,
    ) -> None:
        refuse_by_config(model)
        if release is True and self._needs_weights:
            raise self._keeps(model, self._needs_weights)
        _check_choices(exact=exact, fuse=fuse, release=release)
        check_pack(pack, quantise)
        check_quantise(model, quantise)
        if stock:
            check_stock(
                model, exact=exact, pack=pack, fuse=fuse, quantise=quantise, static=static, release=release
            )
            exact = pack = fuse = False
        self.stock = stock
        self.quantised = quantise or ""
        self.chains_only = why_chains_only(model)
        if self.chains_only and (static or fuse is True):
            raise _only_chains(model, self.chains_only)
        if not self.chains_only and takes_no_tree(model.config.get_text_config(decoder=True)):
            model = exchange(model, lambda _: None, TREE)
        self.model = model
        self.static = static
        config = model.config.get_text_config(decoder=True)
        self.context = context_of(config)
        self.eos_token_ids = end_tokens(model)
        self._keep_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.device = device_of(model.get_input_embeddings())
        self._hidden_size = size_in(config, "hidden_size", model)
        self._scale = scale_of(config)
        options: dict[str, Any] = {"exact": exact, "pack": pack, "fuse": fuse, "quantise": quantise}
        about = {**options, "static": static, "compiled": compiled}
        record = Record(model, about) if check == "auto" else None
        self._choose(bool(check), record, exact, pack, fuse)
        if not static and (runner is not None or compiled is not None):
            raise OutpaceError("runner and compiled are for forwards of fixed shapes: give static=True too")
        if static:
            caches = {shape.keys.device for shape in self._modules.shapes}
            devices = caches | {weight.device for weight in model.parameters()}
            self._fixed = FixedShapes(runner or runner_for(self.device, devices), compiled)
            self._addresses = Places(model.modules())
            if check and self.bit_exact and (reason := self._bits(record)):
                raise self._not_exact(reason)
        if check:
            step, make = self._modules.step, partial(self._unchecked, **options)
            answer(record, "steps", step, lambda: tested(self, self.reference(), make))
        self.released = bool(release) and not self._needs_weights and self._modules.release()
        if release is True and not self.released:
            raise self._keeps(model, "no layer's weights have a packed or rounded copy")

    def _choose(
        self,
        check: bool,
        record: Record | None,
        exact: bool | Literal["auto"],
        pack: bool | str,
        fuses: bool | Literal["auto"],
    ) -> None:
        """Choose the modules that steps run on, and determine whether they are bit-exact."""
        self._on_gpu = runs_on_gpu(self.model)
        fixed = "its shapes are fixed" if self.static else ""
        if fixed and fuses is True:
            raise UnsupportedModel(f"{family(self.model)} cannot be fused: {fixed}; leave fuse or static out")
        alone = self.chains_only and "it takes chains only, which run on the model's own attention"
        self.unfused = fixed or alone or fusing_refused(self.model, pack, fuses)
        self.fused = not self.unfused
        reason = alone or why_not_exact(self.model, exact, self.fused) or ("" if self._on_gpu else fixed)
        if not reason:
            try:
                self._take(packing_wanted(self.model, pack, exact=True), exact=True)
                step = self._modules.step
                reason = unproven(step) or (unproven_norm(step) if self._on_gpu else "")
                # Without a check it is known to pass; fixed shapes are tested when they exist.
                if not (reason or self.static) and (check or exact is not True):
                    reason = self._bits(record)
            except UnsupportedModel as error:
                reason = str(error)
        if reason and exact is True:
            raise self._not_exact(reason)
        if reason:
            vars(self).pop("_modules", None)  # its copies of weights are not to count as used memory
            self._take(packing_wanted(self.model, pack, exact=False), exact=False)
        elif pack is True and not self.packed:
            raise self._not_exact("no kernel of packed weights gives a row the same bits; or leave pack out")
        self.bit_exact, self.inexact = not reason, STOCK if self.stock else reason
        self._line_untried = True

    def _bits(self, record: Record | None) -> str:
        """The reason why steps are not bit-exact; empty if they are."""
        step = self._modules.step
        question = "bits of fixed shapes" if self._fixed else "bits"
        return answer(record, question, step, lambda: bit_test(self, step, self._embedded))

    def _not_exact(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{family(self.model)} is not bit-exact: {reason}; leave exact out")

    @staticmethod
    def _keeps(model: Any, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{family(model)} keeps its weights: {why}; leave release out")

    def _take(self, packs: bool | Kernel, exact: bool) -> None:
        """Make the modules that steps run on."""
        self._line_untried, self._packs = False, packs
        self._modules = found = Modules(
            self.model, packs, exact, self.fused, self.quantised, bool(self.chains_only)
        )
        self.packed, self.row_step, self.vocabulary = found.packed, found.row_step, found.vocabulary

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return self._takes_lines and self._mixes

    @property
    def _takes_lines(self) -> bool:
        if self._line_untried:
            self._line_untried = False
            self._try_lines()
        return self._modules.line is not None

    def _try_lines(self) -> None:
        """Make a copy of the step for rows in a line, if it takes them, as a small forward shows."""
        attention = line_attention(self._modules.step)
        packs = self._packs_lines and not (self.static or self.chains_only)
        if not packs or attention is None or untouchable(self._modules.step):
            return
        line = exchange(self._modules.step, lambda _: None, attention)
        # A tree beside a row, and rows of a prompt that are wide enough for a window of their own.
        nodes = max(5, 4 * self.row_step)
        tree = Rows([node % 2 for node in range(nodes)], (-1, 0, 0, 1, 2, *range(4, nodes - 1)))
        prompt = Rows([node % 2 for node in range(nodes + WINDOW)], unread=nodes)
        for feeds in ([tree, Rows([1]), prompt], [tree, Rows([1])]):
            self._modules.line, self._mixes = None, prompt in feeds
            cache = self.new_cache(slots=3, length=nodes + WINDOW)
            rows = {cache.allocate(): own for own in feeds}
            try:
                padded = self.forward(cache, rows)
                self._modules.line = line
                in_line = self.forward(cache, rows)
            except Exception:  # some code of the family's own may not take keys of more sequences than rows
                _log.debug("%s does not support rows in a line", family(self.model), exc_info=True)
                self._modules.line = None
                continue
            expected, found = (torch.cat([o.logits_of(slot) for slot in rows]) for o in (padded, in_line))
            if torch.equal(found, expected):
                return
            self._modules.line = None
            if not self.bit_exact:
                alone = [self.forward(cache, {slot: own}).logits_of(slot) for slot, own in rows.items()]
                if agree(found, expected, torch.cat(alone)):
                    self._modules.line = line
                    return

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
        self._take(self._packs, self.bit_exact)
        self._line_untried = True
        self._others = None  # so that the revision is another
        if self._fixed is not None:
            self._fixed, self._addresses = self._fixed.anew(), Places(self.model.modules())

    def replaced(self) -> str | None:
        return self._modules.structure.changed(modules=not self._runs_model)

    @property
    def _runs_model(self) -> bool:
        """True if steps run the model itself, so that they follow its modules."""
        return self._modules.step is self.model and self._fixed is None and not self._is_part

    def keep_modules(self) -> None:
        """Accept changes of the model's modules that change none of its outputs."""
        self._modules.structure.accept()

    def revision(self) -> int:
        self._follow(begins=True)
        if self._others is None or self._others.changed(thorough=True):
            self._others = Weights(self._modules.live())
            self._revision += 1
        return self._revision

    def _follow(self, begins: bool) -> None:
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
            self._modules.line, self._line_untried = None, True  # which is a copy of its modules
        moved = begins and self._addresses is not None and self._addresses.moved()
        if moved or self._modules.changed(begins):
            self.renew()

    @property
    def _embedded(self) -> int:
        """Number of token ids that have an embedding."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def identity(self) -> str:
        layouts = [
            f"{kernel} weights" if kernel in QUANTISED else f"packed by {kernel}" for kernel in self.packed
        ]
        if self.fused:
            layouts.append("fused")
        return ", ".join([super().identity, *layouts, *(["bit-exact"] if self.bit_exact else [])])

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> KVCache:
        kind = StaticCache if self.static else KVCache
        return kind(self._modules.shapes, slots, length, capacity)

    def forward(
        self,
        cache: Cache,
        feeds: Mapping[Slot, Rows],
        logits_from: int | None = 0,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        return self.run(cache, feeds, logits_from, hidden_layers, self._given(cache, feeds))

    @torch.inference_mode()
    def run(
        self,
        cache: Cache,
        feeds: Mapping[Slot, Rows],
        logits_from: int | None = 0,
        hidden_layers: Sequence[int] = (),
        states: Mapping[Slot, Tensor] | None = None,
    ) -> Output:
        """``forward``, optionally with the first layer's inputs instead of tokens.

        Args:
            states: slot -> [its rows, hidden size], instead of the tokens' embeddings; the tokens are then
                ignored.
        """
        if self.model.training:
            raise OutpaceError(f"{family(self.model)} is in training mode; call model.eval()")
        check_chains(self, feeds)
        own, widths = own_cache(self, cache, KVCache), {slot: len(row.tokens) for slot, row in feeds.items()}
        self._follow(begins=not all(map(own.length, feeds)))
        if self._fixed is not None and isinstance(own, StaticCache) and logits_from is not None:
            width = width_of(own, max(widths.values()))
            if width:
                window = own.begin_fixed(widths, width)
                rows, layers = rows_of(window, feeds), tuple(hidden_layers)
                run = self._forward_fixed
                made = self._fixed.run(run, own, window, rows, self.hidden, layers, states)
                logits = made.logits[:, logits_from:]
                return Output.of(window.slots, feeds, logits, logits_from, made.hidden)
        lines = len(feeds) > 1 and not logits_from and states is None and self._takes_lines
        mixes = lines and self._mixes
        alone = widths if self.chains_only else apart(widths) if mixes else ()
        windows = own.begin(widths, self.row_step, self._modules.least_rows, alone)
        outputs = []
        for group in [windows] if mixes else [[window] for window in windows]:
            if lines and (line := Line(group, self.row_step, self._modules.least_rows)).pays:
                outputs.append(self._pass_line(line, feeds, logits_from is not None, hidden_layers))
            else:
                outputs.append(self._pass(group[0], feeds, logits_from, hidden_layers, states))
        return Output.join(outputs)

    def _pass(
        self,
        window: Window,
        feeds: Mapping[Slot, Rows],
        logits_from: int | None,
        hidden_layers: Sequence[int],
        states: Mapping[Slot, Tensor] | None,
    ) -> Output:
        """A forward of the model over one window."""
        both, mask = self._inputs(window, feeds)
        ids, places = both.to(self.device, non_blocking=True).unbind()
        wanted = 0 if logits_from is None else max(window.width - logits_from, 0)
        given = {"input_ids": ids} if states is None else {"inputs_embeds": padded(window, states)}
        made = self._made(
            self._modules.step,
            given,
            mask,
            self._rotated(window, places),
            CacheAdapter(window, self._modules.places),
            wanted,
            hidden_layers,
        )
        return Output.of(
            window.slots, feeds, made.logits[:, -wanted:] if wanted else None, logits_from, made.hidden
        )

    def _inputs(self, window: Window, feeds: Mapping[Slot, Rows]) -> tuple[Tensor, Mask]:
        """Tokens and positions of a window's rows, padded, [2, B, width], and their mask."""
        rows = rows_of(window, feeds)
        tokens, positions = inputs_of(rows, window)
        # One tensor for both, for a single copy to the device. NumPy reads lists four times as fast as torch.
        both = torch.from_numpy(np.array([tokens, positions]))
        return both, self._modules.masks(rows, window, positions, self.device)

    def _pass_line(
        self, line: Line, feeds: Mapping[Slot, Rows], logits: bool, hidden_layers: Sequence[int]
    ) -> Output:
        """A forward of the model over all windows, their rows in a line."""
        inputs, masks = zip(*(self._inputs(window, feeds) for window in line.windows), strict=True)
        ids, places = line.inputs(inputs).unbind()
        read = line.read(feeds) if logits else torch.empty(0)
        made = self._made(
            self._modules.line,
            {"input_ids": ids},
            line.mask(masks),
            places,
            CacheAdapter(line, self._modules.places),
            read if len(read) else 0,
            hidden_layers,
        )
        return Output.of_line(line.slots, feeds, made.logits[0] if len(read) else None, made.hidden)

    def _rotated(self, window: Window, positions: Tensor) -> Tensor:
        """The positions that the model is given, from those in the text, [B, width]."""
        return positions

    def _made(
        self,
        model: Any,
        given: Mapping[str, Tensor],
        mask: Mask,
        positions: Tensor,
        cache: CacheAdapter,
        wanted: int | Tensor,
        hidden_layers: Sequence[int],
    ) -> Made:
        """Run the model, compiled or not.

        Returns:
            Logits of the rows ``wanted``, or, for a number, of at least the last N.
        """
        read: int | slice | Tensor = wanted
        if not isinstance(wanted, Tensor) and not wanted:  # for transformers, 0 means all
            read = slice(0) if hidden_layers else 1  # some models are quicker with a number
        more: dict[str, Any] = {self._modules.cache_argument: cache}
        if self._keep_logits:
            more["logits_to_keep"] = read
        if hidden_layers:
            more["output_hidden_states"] = True
        output = model(
            **given,
            use_cache=True,
            **self._modules.placing(mask, positions),
            **more,
        )
        logits = output.logits
        if isinstance(wanted, Tensor) and not self._keep_logits:
            logits = logits[:, wanted]
        return Made(logits, {layer: output.hidden_states[layer] for layer in hidden_layers})

    def _forward_fixed(self, inputs: FixedInputs, hidden_layers: Sequence[int]) -> Made:
        """Run the forward from the data in the inputs, without any data from the host."""
        rows = inputs.rows
        at = placed(inputs.numbers, rows.width)
        rows.rows = torch.where(at.trees.real, at.rows, rows.scratch)
        given = {"input_ids": at.tokens} if inputs.states is None else {"inputs_embeds": inputs.states}
        assert self._fixed is not None
        return self._made(
            self._fixed.compiled(self._modules.step),
            given,
            self._modules.masks.of(at.trees, rows.columns),
            at.trees.positions,
            CacheAdapter(rows, self._modules.places),
            rows.width,
            hidden_layers,
        )

    def _twin(self) -> CausalTarget:
        """Make a copy whose model or embeddings can be replaced."""
        found = copy.copy(self)
        found._fixed = self._fixed and self._fixed.anew()
        return found

    @property
    def layers(self) -> int:
        return size_in(self.model.config.get_text_config(decoder=True), "num_hidden_layers", self.model)

    def some_layers(self, layers: Sequence[int], bare: bool = False) -> CausalTarget:
        """See ``TargetModel``. With ``bare``, norm and head are omitted: the logits are hidden states."""
        part = self._twin()
        part._is_part = True
        part._line_untried = False
        part._modules = self._modules.some_layers(layers, bare)
        part.model = part._modules.model
        return part

    def over_window(self, sinks: int, recent: int) -> CausalTarget:
        if self._fixed is not None:
            raise UnsupportedModel("a target of fixed shapes has no windows of its cache; leave static out")
        part = self._twin()
        part._is_part = True
        part._line_untried = False
        part._modules = self._modules.over_window(sinks, recent)
        return part

    def with_embeddings(self, table: Tensor | int) -> CausalTarget:
        embeddings: Any = self.model.get_input_embeddings()
        found = self._twin()
        found._table = extra_rows(embeddings.weight, table)
        found.extra = len(found._table)
        answers = []
        # The second row makes ``found`` use embeddings; the first does not attend to it.
        for target, own in ((found, [1, self.vocabulary]), (self, [1, 1]), (self, [1])):
            cache = target.new_cache(length=4)
            slot = cache.allocate()
            answers.append(target.forward(cache, {slot: Rows(own)}).logits_of(slot)[:1].clone())
        if not agree(*answers):
            raise UnsupportedModel(
                f"{family(self.model)} gives other logits when given embeddings in place of token ids; "
                "use another drafter"
            )
        return found

    @torch.inference_mode()
    def _given(self, cache: Cache, feeds: Mapping[Slot, Rows]) -> dict[Slot, Tensor] | None:
        """Inputs of the first layer by slot, [rows, hidden size]; None if all are the tokens' embeddings."""
        if not self.extra or all(token < self.vocabulary for row in feeds.values() for token in row.tokens):
            return None
        ids = torch.tensor([token for row in feeds.values() for token in row.tokens], device=self.device)
        past = ids >= self.vocabulary
        states = self.embed(ids.masked_fill(past, 0))
        states[past] = self._table.to(states)[ids[past] - self.vocabulary]
        widths = [len(row.tokens) for row in feeds.values()]
        return dict(zip(feeds, states.split(widths), strict=True))

    def through(
        self,
        states: Tensor,
        positions: Tensor,
        seen: Tensor,
        hidden_layers: Sequence[int] = (),
        weights: Mapping[str, Tensor] | None = None,
    ) -> Reading:
        self._need_weights()
        arguments = {
            "inputs_embeds": states,
            "output_hidden_states": bool(hidden_layers),
            **self._whole(positions, seen),
        }
        # Gradients reach only the given weights, not the model's own.
        own = {name: weight.detach() for name, weight in self.model.named_parameters()}
        output = torch.func.functional_call(self.model, own | dict(weights or {}), kwargs=arguments)
        return Reading(output.logits, {layer: output.hidden_states[layer] for layer in hidden_layers})

    def read(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        self._need_weights()
        logits: Tensor = self.model(input_ids=tokens, **self._whole(positions, seen)).logits
        return logits

    def states(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Inputs of the head, [B, N, hidden size], by ``read``'s forward."""
        self._need_weights()
        states: Tensor = self.model.base_model(input_ids=tokens, **self._whole(positions, seen))[0]
        return states

    def _need_weights(self) -> None:
        if self.released:
            raise OutpaceError(
                f"{family(self.model)} cannot be trained or read as a whole: its weights were released; load "
                "it again without release"
            )

    def _whole(self, positions: Tensor, seen: Tensor) -> dict[str, Any]:
        """Arguments of a forward without a cache, except its inputs."""
        mask = self._modules.own_masks.given(seen, positions)
        return {"attention_mask": mask, "position_ids": positions, "use_cache": False}

    @property
    def hidden(self) -> HiddenStates:
        return HiddenStates(self._hidden_size, self.model.dtype, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        embeddings: Any = self.model.get_input_embeddings()
        with torch.no_grad():
            embedded: Tensor = embeddings(tokens)
        return embedded

    def head(self, states: Tensor) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        logits: Tensor = head(states.to(head.weight.dtype))
        return self._scale(logits)

    def reference(self) -> Stock:
        """The model that the self-test compares with."""
        step = self._modules.step
        model: Any = self.model
        if self.quantised:  # the rounded weights, with the model's own attention
            model = exchange(step, lambda _: None, self._attention)
        bare = partial(self._unchecked, exact=False, pack=False, fuse=False)
        pack = self._packs.name if isinstance(self._packs, Kernel) else bool(self.packed) and "auto"
        same = partial(self._unchecked, exact=self.bit_exact, pack=pack, fuse=self.fused)
        own = step is self.model or bool(self.quantised)
        return Stock(model, _run, bare, self._embedded, (self.model, step), None if own else same)

    def _unchecked(self, model: Any, **options: Any) -> CausalTarget:
        """A target of another model, not tested."""
        return type(self)(model, self.static, False, **options)

    @property
    def _attention(self) -> str:
        """The model's implementation of attention."""
        name: str = self.model.config.get_text_config(decoder=True)._attn_implementation
        return name


def _run(model: Any, source: Source | None, ids: Tensor, **options: Any) -> Any:
    """A plain forward over texts [B, n]."""
    return model(input_ids=ids, use_cache=False, **options)


def _check_choices(**options: Any) -> None:
    """Refuse values of options other than True, False and "auto".

    Raises:
        OutpaceError: a value is another.
    """
    for name, value in options.items():
        if not isinstance(value, bool) and value != "auto":
            raise OutpaceError(f"{name} must be True, False or 'auto', not {value!r}")


def _only_chains(model: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{family(model)} takes chains only, since {reason}; leave static and fuse out")


def scale_of(config: Any) -> Callable[[Tensor], Tensor]:
    """The function that a family applies to the logits of its head: a factor, and a soft cap."""
    # Cohere multiplies, Granite divides.
    factor = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)

    def scale(logits: Tensor) -> Tensor:
        logits = logits if factor == 1 else logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return scale

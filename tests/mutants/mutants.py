"""Deliberate bugs, room by room, each with the tests that see it. CONTRIBUTING.md says when to add one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A wrong text in the source.

    Attributes:
        name: what is wrong, in a sentence.
        file: where, below ``src`` or ``lab/src``.
        old: the right text, which occurs once in the file.
        new: the wrong one.
        killed_by: files of tests, or tests, all of them quick, also with ``-k`` and words; in each one fails.
        untested: targets are not self-tested, which would refuse them before a test begins.
        reason: why no quick test sees it; ``killed_by`` are slow tests then.
    """

    name: str
    file: str
    old: str
    new: str
    killed_by: tuple[str, ...]
    untested: bool = False
    reason: str = ""


_MATRIX = "tests/lossless/test_matrix.py::test_all_samplings_in_a_batch_that_sequences_join"
_CACHE = "tests/unit/test_cache.py"
_PLANS = "tests/unit/targets/test_plans.py"
_PACKING = "tests/unit/targets/test_packing.py"
_NATIVE = "tests/unit/targets/test_native.py"
_SELF = "tests/unit/drafters/test_rounded_self.py"
_ROUNDED = "tests/unit/targets/test_rounded.py"
_TREES_ON_GPU = "tests/unit/targets/test_trees_on_gpu.py::test_branches_take_the_kernel_and_nothing_else_does"
_BROUGHT = "tests/unit/engine/test_brought.py"
_SMALL = "tests/unit/drafters/test_small_vocabularies.py"
_ROUTER = "tests/serve/test_router.py"
_TOY = "tests/unit/test_testing.py::test_drafts_change_no_token"

CACHE = [
    Mutant(
        "the first rows of a forward are kept, not those of the path",
        "outpace/cache/kv.py",
        "                path = paths.get(seat.slot, ())\n",
        "                path = range(len(paths.get(seat.slot, ())))\n",
        (_TOY, f"{_MATRIX} -k lookahead"),
        untested=True,
    ),
    Mutant(
        "the first rows of a tree of trained heads are kept, not those of the path",
        "outpace/cache/kv.py",
        "                path = paths.get(seat.slot, ())\n",
        "                path = range(len(paths.get(seat.slot, ())))\n",
        (f"{_MATRIX} -k hydra",),
        untested=True,
    ),
    Mutant(
        "of a path the last row is not kept",
        "outpace/cache/kv.py",
        "                seat.length += len(path)\n            if places:",
        "                seat.length += max(len(path) - 1, min(len(path), 1))\n            if places:",
        (_CACHE, _TOY),
    ),
    Mutant(
        "rejected rows stay in the cache",
        "outpace/cache/kv.py",
        "                seat.length += len(path)\n            if places:",
        "                seat.length += width\n            if places:",
        (_CACHE, _TOY),
    ),
    Mutant(
        "the last layer's values do not move along with the keys",
        "outpace/cache/lanes.py",
        "                layers, heads = len(layout.members), layout.shape.heads\n",
        "                layers, heads = len(layout.members) - 1, layout.shape.heads\n",
        (f"{_CACHE}::test_against_a_list", _TOY),
    ),
    Mutant(
        "rows move in the opposite direction",
        "outpace/native/move.c",
        "memcpy(rows + targets[move] * row, rows + sources[move] * row, row);",
        "memcpy(rows + sources[move] * row, rows + targets[move] * row, row);",
        (f"{_CACHE}::test_against_a_list",),
    ),
    Mutant(
        "a slot moves to another lane without its rows",
        "outpace/cache/lanes.py",
        "        self._copy(old, place, seat.place, seat.written)\n",
        "",
        (f"{_CACHE}::test_slots_that_grow_together_stay_together", "tests/lossless/test_lanes.py"),
    ),
    Mutant(
        "the last slot moves to the place of one that left without its rows",
        "outpace/cache/lanes.py",
        "            self._copy(self, last.place, place, last.written)\n",
        "",
        (f"{_CACHE}::test_against_a_list", "tests/unit/engine/test_together.py"),
    ),
    Mutant(
        "the last slot does not take the place of one that left",
        "outpace/cache/lanes.py",
        "            self.seats[place] = last\n            last.place = place\n",
        "            last.place = place\n",
        (f"{_CACHE}::test_against_a_list",),
    ),
    Mutant(
        "a lane that grows loses the last row of its longest slot",
        "outpace/cache/lanes.py",
        "used, rows = len(self.seats), max((seat.written for seat in self.seats), default=0)",
        "used, rows = len(self.seats), max((seat.written - 1 for seat in self.seats), default=0)",
        (f"{_CACHE}::test_against_a_list",),
    ),
    Mutant(
        "padding is written to the last row of a slot",
        "outpace/cache/lanes.py",
        "            scratch = self.lane.room\n",
        "            scratch = self.lane.room - 1\n",
        (f"{_CACHE}::test_against_a_list",),
    ),
    Mutant(
        "what was captured over a lane's memory outlives it",
        "outpace/cache/lanes.py",
        "        self.memory = LaneMemory()  # first: what was captured holds the old buffers\n",
        "",
        ("tests/lossless/test_graphs.py::test_lanes_grow",),
    ),
    Mutant(
        "graphs of drafts give texts of several lanes each other's drafts",
        "outpace/drafters/support/programs.py",
        "np.argsort(growth.order).tolist()",
        "growth.order",
        ("tests/lossless/test_graphs.py::test_drafts_for_texts_in_several_lanes",),
    ),
    Mutant(
        "a kernel's top-k takes one token less",
        "outpace/draws/draw_kernel.py",
        "tried, count < top_k)",
        "tried, count <= top_k)",
        ("tests/unit/draws/test_draw_kernel.py::test_tokens_after_cuts_are_the_references",),
    ),
    Mutant(
        "rows that were written provisionally stay",
        "outpace/cache/kv.py",
        "                    seat.lane.clear(seat, length)\n                seat.length = length\n",
        "                    seat.lane.clear(seat, length)\n",
        (f"{_CACHE}::test_provisional_rows",),
    ),
    Mutant(
        "the last row of a prefix is not copied into the slot",
        "outpace/cache/kv.py",
        "            buffer[:, seat.place, :, start:stop] = own\n",
        "            buffer[:, seat.place, :, start : stop - 1] = own[:, :, :-1]\n",
        (
            "tests/unit/engine/test_prefix.py",
            "tests/unit/engine/test_together.py::test_every_completed_text_is_that_of_plain_decoding",
        ),
    ),
    Mutant(
        "a forward of fixed shapes leaves out its last place",
        "outpace/cache/static.py",
        "covered = range(min(power_of_two(max(widths) + 1), lane.places))",
        "covered = range(min(power_of_two(max(widths)), lane.places))",
        ("tests/lossless/test_static.py::test_tokens_are_those_of_plain_decoding",),
    ),
]

TREES = [
    Mutant(
        "a node's position is its place in the forward, not its depth",
        "outpace/tree.py",
        "        found.append(0 if parent < 0 else found[parent] + 1)\n",
        "        found.append(len(found))\n",
        (_TOY, f"{_MATRIX} -k lookahead"),
        untested=True,
    ),
    Mutant(
        "a node attends to every node before it, not only to its ancestors",
        "outpace/tree.py",
        "    if is_chain(parents):\n        return chain_mask(size)\n",
        "    if parents:\n        return chain_mask(size)\n",
        (_TOY, f"{_MATRIX} -k lookahead"),
        untested=True,
    ),
    Mutant(
        "every node hangs under the root",
        "outpace/targets/rows.py",
        "        parents = (*range(-1, root), *(root + 1 + parent for parent in draft.parents))\n",
        "        parents = (*range(-1, root), *[root] * len(draft))\n",
        (_TOY,),
    ),
    Mutant(
        "the root's children hang under its first child",
        "outpace/targets/rows.py",
        "        parents = (*range(-1, root), *(root + 1 + parent for parent in draft.parents))\n",
        "        parents = (*range(-1, root), *(root + max(parent, 0) for parent in draft.parents))\n",
        (_TOY,),
    ),
    Mutant(
        "a draft under a prompt of several rows hangs under its first rows",
        "outpace/targets/rows.py",
        "        parents = (*range(-1, root), *(root + 1 + parent for parent in draft.parents))\n",
        "        parents = (*range(-1, root), *(parent + 1 for parent in draft.parents))\n",
        ("tests/unit/test_testing.py::test_prompt_and_draft_in_one_forward",),
    ),
    Mutant(
        "a path begins with its last node",
        "outpace/tree.py",
        "    return path[::-1]\n",
        "    return path\n",
        ("tests/unit/test_tree.py",),
    ),
    Mutant(
        "leaves of a sampled draft are chosen by what was drawn",
        "outpace/tree.py",
        "    if draft.chances is not None and draft.distributions is None:\n",
        "    if draft.chances is not None:\n",
        ("tests/unit/test_tree.py",),
    ),
]

DRAWS = [
    Mutant(
        "NaN logits are accepted by greedy decoding",
        "outpace/draws/sampling.py",
        "    return [token if rows[row, token] > -math.inf else -1 for row, token in enumerate(places)]\n",
        "    return [token if rows[row, token] != -math.inf else -1 for row, token in enumerate(places)]\n",
        ("tests/unit/engine/test_isolation.py::test_logits_that_are_not_numbers",),
    ),
    Mutant(
        "the target's noise is the same at each output index",
        "outpace/draws/noise.py",
        "        return key(self.seed, Stream.TARGET, index)\n",
        "        return key(self.seed, Stream.TARGET, 0)\n",
        ("tests/unit/verify/test_draws.py::test_the_targets_own_draws_share_no_key",),
    ),
    Mutant(
        "nodes of a draft share their draws",
        "outpace/draws/noise.py",
        "        return key(self.seed, stream, root, node)\n",
        "        return key(self.seed, stream, root)\n",
        ("tests/unit/verify/test_draws.py::test_no_two_draws_share_a_key",),
    ),
    Mutant(
        "siblings share an accept draw",
        "outpace/sequence.py",
        "        return uniform(self.sequence.key.node(Stream.ACCEPT, self.root, node)) < probability\n",
        "        return uniform(self.sequence.key.node(Stream.ACCEPT, self.root, 0)) < probability\n",
        ("tests/unit/verify/test_draws.py::test_no_two_draws_share_a_key",),
    ),
    Mutant(
        "accept draws are keyed by the position",
        "outpace/sequence.py",
        "        return uniform(self.sequence.key.node(Stream.ACCEPT, self.root, node)) < probability\n",
        "        return uniform(self.sequence.key.node(Stream.ACCEPT, 0, self.root + node)) < probability\n",
        ("tests/unit/verify/test_draws.py::test_no_two_draws_share_a_key",),
    ),
    Mutant(
        "coupled drafts are drawn with the noise of the root's token at every depth",
        "outpace/sequence.py",
        "            word = sequence.key.target(self.root + len(guessed))\n",
        "            word = sequence.key.target(self.root)\n",
        ("tests/unit/drafters/test_draft_model.py::test_drafts_are_drawn_by_the_streams_they_say",),
    ),
    Mutant(
        "penalties leave out the tokens of the path",
        "outpace/draws/own_tokens.py",
        "        (row, ask.processor.params, *ask.processor.counts(ask.path))\n",
        "        (row, ask.processor.params, *ask.processor.counts())\n",
        ("tests/unit/draws/test_own_tokens.py::test_the_tokens_at_all_nodes_are_the_references",),
    ),
    Mutant(
        "top-k, top-p and min-p come before the temperature",
        "outpace/draws/sampling.py",
        "    return scores if params.greedy else truncate(heat(scores, params), params)\n",
        "    return scores if params.greedy else heat(truncate(scores, params), params)\n",
        ("tests/unit/draws/test_sampling.py",),
    ),
    Mutant(
        "the children of the second of two equal siblings are not reached",
        "outpace/draws/own_tokens.py",
        "[child for node in nodes for child in below[place][node] if tokens[child] == token]",
        "[child for node in nodes[:1] for child in below[place][node] if tokens[child] == token]",
        ("tests/unit/draws/test_own_tokens.py",),
    ),
    Mutant(
        "tokens that decide a draw are too few",
        "outpace/draws/many_rows.py",
        "_NEVER = math.exp(-41)\n",
        "_NEVER = math.exp(-3)\n",
        ("tests/unit/draws/test_own_tokens.py::test_the_tokens_at_all_nodes_are_the_references",),
    ),
    Mutant(
        "the compiled draw leaves out the k-th token",
        "outpace/native/draw.c",
        "weights[token] = scores[token] < least ? 0.0f : weight;",
        "weights[token] = scores[token] <= least ? 0.0f : weight;",
        ("tests/unit/draws/test_own_tokens.py",),
    ),
    Mutant(
        "the hash shifts signs in",
        "outpace/draws/noise.py",
        "    return words ^ (words >> 31 & (1 << 33) - 1)\n",
        "    return words ^ words >> 31\n",
        ("tests/unit/draws/test_sampling.py::test_tensors_are_hashed_as_integers_are",),
    ),
]

SEQUENCE = [
    Mutant(
        "one more token is emitted than asked for",
        "outpace/sequence.py",
        'StoppedBy("limit") if self.room <= 0 else None\n\n    def fail(',
        'StoppedBy("limit") if self.room < 0 else None\n\n    def fail(',
        ("tests/unit/engine/test_engine.py::test_no_more_tokens_than_asked_for",),
    ),
    Mutant(
        "scores of the first draw of a step are used for all",
        "outpace/sequence.py",
        "        if self._latest is None or self._latest[0] != sequence.output_length:\n",
        "        if self._latest is None:\n",
        ("tests/unit/verify/test_draws.py::test_a_processor_sees_each_true_prefix_once",),
    ),
    Mutant(
        "refills are drawn with the noise of the output index before",
        "outpace/sequence.py",
        "        indices = [self.root + depth[node] + 1 for node in nodes]\n",
        "        indices = [self.root + depth[node] for node in nodes]\n",
        ("tests/unit/drafters/test_jacobi.py::test_the_right_block_is_the_fixed_point",),
    ),
    Mutant(
        "the stop string that begins first ends the text, not the one that ends first",
        "outpace/text.py",
        "            _, place, self.stopped_by = min(found)\n",
        "            _, place, self.stopped_by = min(found, key=lambda each: each[1])\n",
        ("tests/unit/test_text.py",),
    ),
    Mutant(
        "text is shown that could become a stop string",
        "outpace/text.py",
        "        if not (final or self.stopped):\n            end -=",
        "        if self.stopped:\n            end -=",
        ("tests/unit/test_text.py",),
    ),
]

_EXACT = "tests/unit/verify/test_exact.py"

VERIFY = [
    Mutant(
        "a drafted token is emitted that is not the target's own",
        "outpace/verify/match.py",
        "        token = draw.token(logits, node)\n        candidates",
        "        token = draw.token(logits, node)\n"
        "        if below[node]:\n            token = draft.tokens[below[node][0]]\n        candidates",
        (_EXACT, f"{_MATRIX} -k lookahead"),
    ),
    Mutant(
        "of equal siblings the first alone is followed",
        "outpace/verify/match.py",
        "[child for parent in nodes for child in below[parent]]",
        "[child for parent in nodes[:1] for child in below[parent]]",
        ("tests/unit/verify/test_match.py",),
    ),
    Mutant(
        "a rejected candidate stays in p",
        "outpace/verify/rejection.py",
        "    left[token] = 0\n",
        "",
        (_EXACT,),
    ),
    Mutant(
        "a rejected token is drawn again from q",
        "outpace/verify/rejection.py",
        "        token = draw.choose(left, node) if accepted is None",
        "        token = draw.choose(q, node) if accepted is None",
        (_EXACT,),
    ),
    Mutant(
        "every drafted token is accepted",
        "outpace/verify/rejection.py",
        "        if draw.accept(min(1.0, likelihood_ratio(q, p, token) / lenience), child):\n",
        "        if draw.accept(min(1.0, 1e9 * likelihood_ratio(q, p, token)), child):\n",
        (_EXACT,),
    ),
    Mutant(
        "the children of an equal sibling are not followed after an acceptance",
        "outpace/verify/rejection.py",
        "            nodes = [child for child in siblings if draft.tokens[child] == token]\n",
        "            nodes = [accepted]\n",
        ("lab/tests/unit/verify/test_traversal.py::test_a_path_through_the_second_of_two_equal_siblings",),
    ),
    Mutant(
        "a beginning is accepted as if it were the whole chain",
        "outpace_lab/verify/block.py",
        "        chance = share if p is None else chance_of_prefix(share, total)\n",
        "        chance = share\n",
        ("lab/tests/unit/verify/test_exact.py",),
    ),
    Mutant(
        "no token of a path makes up for another",
        "outpace_lab/verify/traversal.py",
        "            share = min(1.0, frame.share * likelihood_ratio(frame.q, frame.p, token))\n",
        "            share = frame.share * min(1.0, likelihood_ratio(frame.q, frame.p, token))\n",
        ("lab/tests/unit/verify/test_exact.py",),
    ),
    Mutant(
        "equal siblings are not followed together",
        "outpace_lab/verify/traversal.py",
        "frames.append(enter(equal if together else [child], share))",
        "frames.append(enter([child], share))",
        ("lab/tests/unit/verify/test_traversal.py",),
    ),
    Mutant(
        "gamma is 1, whatever the number of candidates",
        "outpace_lab/verify/spectr.py",
        "    return high\n",
        "    return 1.0\n",
        ("lab/tests/unit/verify/test_exact.py",),
    ),
]
ENGINE = [
    Mutant(
        "rows of a path are kept one row too early",
        "outpace/engine/step.py",
        "*(ahead + 1 + node for node in step.path)]",
        "*(ahead + node for node in step.path)]",
        ("tests/unit/engine/test_engine.py",),
    ),
    Mutant(
        "a sequence keeps the path of its neighbour",
        "outpace/engine/step.py",
        "_rows_kept(step, a.ahead) for a, step in steps.items()}",
        "_rows_kept(next(iter(steps.values())), a.ahead) for a, step in steps.items()}",
        ("tests/unit/engine/test_speculation.py",),
    ),
    Mutant(
        "a fault while tokens are chosen for all ends all",
        "outpace/engine/step.py",
        '            _log.warning("tokens are chosen node by node in this step", exc_info=True)\n'
        "            return {}\n",
        "            raise\n",
        ("tests/unit/engine/test_isolation.py::test_a_fault_while_tokens_are_chosen_for_all",),
    ),
    Mutant(
        "rows of a prefix are shared between salts",
        "outpace/engine/request.py",
        "            salt=salt,\n",
        "            salt=None,\n",
        ("tests/unit/engine/test_prefix.py::test_a_salt_separates",),
    ),
    Mutant(
        "rows behind an image are shared with those behind another one of the same tokens",
        "outpace/targets/stock/multimodal.py",
        "[(key, next(digests)) if other else key for",
        "[key for",
        (
            "tests/serve/test_images.py::test_the_prefix_cache_tells_images_apart",
            "tests/zoo/test_images.py::test_a_prefix_cache_keeps_images_apart",
        ),
    ),
    Mutant(
        "an image's pixels are not counted before it is decoded",
        "outpace/serve/worker.py",
        '                if size <= job["most"]:\n',
        "                if True:\n",
        ("tests/serve/test_images.py::test_what_cannot_be_read_is_refused_and_others_go_on",),
    ),
    Mutant(
        "an image that is no data URL is taken",
        "outpace/serve/fields.py",
        "    if head is None:\n",
        "    if False:\n",
        ("tests/serve/test_images.py::test_what_cannot_be_read_is_refused_and_others_go_on",),
    ),
    Mutant(
        "stored rows are not compared with their digests",
        "outpace/engine/prefix_file.py",
        "                if _digest(found) != parts[name]:\n",
        "                if False:\n",
        ("tests/unit/test_written.py::test_signs_in_a_quarter_of_the_stored_rows",),
    ),
    Mutant(
        "a recorded self-test is believed though its file is damaged",
        "outpace/targets/step/record.py",
        "            found = unsealed(path, json.load(file))\n",
        "            found = json.load(file)\n",
        ("tests/unit/test_written.py::test_damage_is_refused_or_changes_nothing -k record",),
    ),
    Mutant(
        "a logits processor may return scores of another shape",
        "outpace/draws/sampling.py",
        " and found.shape == scores.shape and ",
        " and ",
        ("tests/unit/engine/test_wrong_types.py::test_processors_that_return_something_else",),
    ),
    Mutant(
        "stored rows of another model are used",
        "outpace/engine/prefix_file.py",
        "    _check(path, entries, target, cache)\n",
        "",
        ("tests/unit/engine/test_prefix_file.py::test_what_is_of_another_model_is_not_used",),
    ),
    Mutant(
        "rows of a prefix are used with other weights",
        "outpace/engine/memory.py",
        "                self.prefixes.clear()\n",
        "                pass\n",
        ("tests/unit/engine/test_changes.py::test_rows_of_a_prefix_are_not_used_with_other_weights",),
    ),
    Mutant(
        "a text that was begun with other weights leaves a prefix",
        "outpace/engine/memory.py",
        "        if self.prefixes is not None and self._began.get(slot) == self._revision:\n",
        "        if self.prefixes is not None:\n",
        (
            "tests/unit/engine/test_changes.py::test_a_text_that_was_begun_with_other_weights_leaves_no_prefix",
        ),
    ),
    Mutant(
        "a sequence that left keeps its slot",
        "outpace/engine/running.py",
        "            self.cache.free(active.slot)\n            if active.started:",
        "            if active.started:",
        ("tests/unit/engine/test_engine.py::test_an_error_while_joining_leaks_no_slot",),
    ),
    Mutant(
        "after an interrupt the cache is not renewed",
        "outpace/engine/engine.py",
        "        self._batch.memory.renew(*self._batch.memory.room)\n",
        "",
        ("tests/unit/engine/test_interrupts.py",),
    ),
    Mutant(
        "after an interrupt drafters are not renewed",
        "outpace/engine/engine.py",
        "            drafting.renew()\n",
        "            pass\n",
        ("tests/unit/engine/test_interrupts.py::test_what_a_drafter_remembers_is_replaced",),
    ),
    Mutant(
        "an engine is used by two threads",
        "outpace/engine/guards.py",
        "            if owner is None or not owner.is_alive():\n",
        "            if owner is not here:\n",
        ("tests/unit/engine/test_isolation.py::test_another_thread_is_refused",),
    ),
    Mutant(
        "a seed is accepted whose tokens depend on the clock",
        "outpace/engine/request.py",
        "    if policy is not None and policy.timed:\n",
        "    if policy is not None and policy.timed and params.greedy:\n",
        (
            "tests/unit/engine/test_adaptive.py::test_a_seed_is_refused_where_its_tokens_would_depend_on_the_clock",
        ),
    ),
]

TARGETS = [
    Mutant(
        "positions of a draft count from 0 after a cache",
        "outpace/targets/inputs/forward.py",
        "    positions = [offset - fed + depth for depth in ahead]\n",
        "    positions = list(ahead)\n",
        (f"{_MATRIX} -k lookahead",),
        untested=True,
    ),
    Mutant(
        "a row attends to one committed row too few",
        "outpace/targets/inputs/masks.py",
        "        mask[sequence, 0, :size, :base] = True\n",
        "        mask[sequence, 0, :size, : max(base - 1, 0)] = True\n",
        ("tests/unit/targets/test_masks.py::test_masks_made_on_a_device_are_those_made_on_the_cpu",),
    ),
    Mutant(
        "a sliding window is one position too wide",
        "outpace/targets/inputs/masks.py",
        "columns[sequence, None, :] > at[sequence, :size, None] - sliding\n",
        "columns[sequence, None, :] >= at[sequence, :size, None] - sliding\n",
        ("tests/unit/targets/test_masks.py::test_masks_made_on_a_device_are_those_made_on_the_cpu",),
    ),
    Mutant(
        "columns of a tree are taken for positions",
        "outpace/targets/inputs/masks.py",
        "        columns[sequence, offset : offset + size] = positions[sequence, :size]\n",
        "        pass\n",
        ("tests/unit/targets/test_masks.py::test_masks_made_on_a_device_are_those_made_on_the_cpu",),
    ),
    Mutant(
        "on a device a node has seen only some of its ancestors",
        "outpace/targets/inputs/device_rows.py",
        "    for _ in range((size - 1).bit_length()):\n",
        "    for _ in range((size - 1).bit_length() - 1):\n",
        ("tests/unit/targets/test_masks.py::test_rows_are_placed_on_a_device_as_on_the_host",),
    ),
    Mutant(
        "rows of a window of its own attend to the sequence beside theirs",
        "outpace/cache/lanes.py",
        "        self.places = slice(covered.start, covered.stop) if"
        " isinstance(covered, range) else covered\n",
        "        beside = len(covered) == 1 < lane.places and (1 if covered[0] == 0 else -1)\n"
        "        self.places = slice(covered[0] + beside, covered[-1] + 1 + beside)\n",
        ("tests/lossless/test_joins.py::test_tokens_are_those_of_each_alone -k lookup",),
        untested=True,
    ),
    Mutant(
        "a replayed forward does not read its inputs",
        "outpace/targets/stock/forwards.py",
        "        at = read_numbers(inputs.numbers, rows.width)\n",
        "        at = read_numbers(torch.ones_like(inputs.numbers), rows.width)\n",
        ("tests/lossless/test_static.py::test_tokens_are_those_of_plain_decoding",),
        untested=True,
    ),
    Mutant(
        "a table of positions is read one row later",
        "outpace/targets/inputs/positions.py",
        "            rows = self._rows(args[0], int(positions.max()) + 1)[positions]\n",
        "            rows = self._rows(args[0], int(positions.max()) + 2)[positions + 1]\n",
        ("tests/unit/targets/test_seq2seq.py::test_a_pad_in_a_draft -k m2m",),
        untested=True,
    ),
    Mutant(
        "every row of a tree sees its first column",
        "outpace/targets/gpu/tree_kernel.py",
        "        seen = there[None, :] & (seen | (inside & (bit == 1)))\n",
        "        seen = there[None, :] & (seen | (inside & ((bit == 1) | (node == 0)[None, :])))\n",
        ("tests/unit/targets/test_tree_attention.py::test_kernels",),
    ),
    Mutant(
        "rows of a bit-exact product are not padded to its step",
        "outpace/targets/cpu/linear.py",
        "        if missing := -count % self.step:\n            padded",
        "        if missing := 0:\n            padded",
        ("tests/unit/targets/test_exact.py::test_rows_are_padded_to_the_step_of_a_kernel",),
    ),
    Mutant(
        "a mistake in a layer that the self-test leaves out is not seen",
        "outpace/targets/step/layer_test.py",
        "        if not off <= share:\n",
        "        if False:\n",
        (f"{_PACKING}::test_a_mistake_in_a_layer_between_is_seen",),
    ),
    Mutant(
        "a panel's last outputs have another's inputs",
        "outpace/native/packing.h",
        "memcpy(square + i, rows[first + i] + at * PAIR, sizeof(lanes));",
        "memcpy(square + i, rows[first] + at * PAIR, sizeof(lanes));",
        (f"{_PACKING}::test_panels_have_every_weight_in_its_place",),
    ),
    Mutant(
        "a write to a page of a file is not looked for",
        "outpace/targets/inputs/changes.py",
        "self.moved() or written(self._ranges) or not",
        "self.moved() or not",
        (f"{_PACKING}::test_any_write_to_a_page_of_a_file_is_seen",),
    ),
    Mutant(
        "a sliding window of a native step is one column too long",
        "outpace/native/forward.h",
        "all > view->window ? all - view->window : 0;",
        "all > view->window ? all - view->window - 1 : 0;",
        (f"{_NATIVE}::test_logits_are_those_of_the_stock_model",),
    ),
    Mutant(
        "a node of a native step sees the row before it, not the one it hangs under",
        "outpace/native/forward.h",
        "for (int i = depth - 1; i >= 0; i--, at = parents[at])",
        "for (int i = depth - 1; i >= 0; i--, at--)",
        (f"{_NATIVE}::test_nodes_of_a_tree_have_the_bits_of_plain_decoding",),
    ),
    Mutant(
        "soft caps are left out of native attention",
        "outpace/targets/native/weights.py",
        '            cap=float(getattr(self.config, "attn_logit_softcapping", None) or 0),\n',
        "            cap=0.0,\n",
        (f"{_NATIVE}::test_logits_are_those_of_the_stock_model",),
    ),
    Mutant(
        "angles are those of the first positions alone",
        "outpace/targets/native/runner.py",
        "if known is not None and positions <= known[1]:",
        "if known is not None:",
        (f"{_NATIVE}::test_positions_beyond_the_first_table_have_angles_of_their_own",),
    ),
    Mutant(
        "given inputs are not put in the order of the lanes",
        "outpace/targets/native/runner.py",
        "            inputs = inputs[torch.from_numpy(moved)]\n",
        "            inputs = inputs[:]\n",
        (f"{_NATIVE}::test_inputs_follow_their_sequences_into_the_order_of_a_lane",),
    ),
    Mutant(
        "exact attention without compiled functions sums in float32",
        "outpace/targets/cpu/exact_attention.py",
        "    near, values = (tensor.double()[:, :, None] for tensor in (key, value))\n",
        "    rows = rows.float()\n"
        "    near, values = (tensor.float()[:, :, None] for tensor in (key, value))\n",
        ("tests/unit/targets/test_exact.py",),
    ),
    Mutant(
        "a window's rows are read for slots that feed theirs in another window",
        "outpace/targets/stock/forwards.py",
        "                part, _ = batch.select([slot for slot, width in fed if width])\n",
        "                part = batch\n",
        (
            "tests/unit/targets/test_causal.py::test_rows_in_windows_of_their_own_have_the_logits_of_each_alone",
        ),
    ),
    Mutant(
        "a window that skips places reads the keys of others",
        "outpace/cache/lanes.py",
        "        return kept[self.places, :, : self.columns], seen[self.places, :, : self.columns]\n",
        "        return kept[: len(self.places), :, : self.columns], seen[self.places, :, : self.columns]\n",
        (
            "tests/unit/targets/test_causal.py::test_rows_in_windows_of_their_own_have_the_logits_of_each_alone",
        ),
    ),
    Mutant(
        "a flat forward's attention gives rows to the sequence before theirs",
        "outpace/targets/cpu/flat_attention.py",
        "            out[part.rows.flatten()[part.real]] = rows\n",
        "            out[part.rows.flatten()[part.real].roll(1)] = rows\n",
        ("tests/lossless/test_joins.py::test_rows_of_transformers_modules_share_forwards",),
    ),
    Mutant(
        "writes to weights are not seen",
        "outpace/targets/stock/causal.py",
        "        if moved or self._modules.changed(begins):\n",
        "        if moved:\n",
        ("tests/unit/targets/test_changes.py", "tests/unit/engine/test_changes.py"),
    ),
    Mutant(
        "layers whose numbers are not their config's are native",
        "outpace/targets/native/fitting.py",
        " or _why_altered(base, recipe)\n",
        "\n",
        (
            "tests/unit/targets/test_attributes.py::test_layers_that_are_not_as_their_config_makes_them_are_not_fused",
        ),
    ),
    Mutant(
        "ranks forget a row that another rank accepted",
        "outpace/targets/ranks/shared_drafts.py",
        "            self.missed[slot] = [fed.tokens[row] for row in path[len(there) :]]\n",
        "            self.missed[slot] = [fed.tokens[row] for row in path[len(there) + 1 :]]\n",
        ("tests/unit/targets/test_shared_drafts.py",),
    ),
    Mutant(
        "a row passes the lower layers twice",
        "outpace_lab/targets/split.py",
        "    return Rows(row.tokens[count:], row.tree[count:], row.tree[:count]) if count else row\n",
        "    return row\n",
        ("lab/tests/unit/targets/test_split.py",),
    ),
    Mutant(
        "a step that is disproved is taken",
        "outpace/targets/step/plans.py",
        "    return (None, reason) if reason else (step, None)\n",
        "    return step, None\n",
        (_PLANS,),
    ),
]
DRAFTERS = [
    Mutant(
        "a row that the rounded self drafted stays in the cache",
        "outpace/drafters/models/rounded_self.py",
        "            with active[0].place.cache.provisional():\n",
        "            if True:\n",
        (f"{_SELF}::test_no_row_of_a_draft_stays_in_the_cache",),
    ),
    Mutant(
        "weights are rounded from stale ones",
        "outpace/targets/stock/rounded.py",
        "        if known is not self.inner._modules or self._live.changed(thorough=False):\n",
        "        if known is None and not hasattr(self, '_part'):\n",
        (f"{_SELF}::test_weights_that_change_are_rounded_anew",),
    ),
    Mutant(
        "a draft of the rounded self goes on from the row of another sequence",
        "outpace/drafters/models/rounded_self.py",
        "        rows = [output.logits_of(state.place.slot)[right[state.place.slot]] for state in left]\n",
        "        rows = [output.logits_of(state.place.slot)[0] for state in reversed(left)]\n",
        (f"{_SELF}::test_a_batch_drafts_as_each_sequence_does_alone",),
    ),
    Mutant(
        "the rounded self goes on after a guess that is not its own",
        "outpace/drafters/models/rounded_self.py",
        "            if state.tree.front and ahead and state.last == ahead[0]:\n",
        "            if state.tree.front and ahead:\n",
        (f"{_SELF}::test_guesses_of_another_drafter_save_forwards_and_change_no_draft",),
    ),
    Mutant(
        "rows of guesses that were wrong stay among those that a draft attends to",
        "outpace/drafters/models/rounded_self.py",
        "    cache.keep({slot: range(count) for slot, count in right.items()})\n",
        "    cache.keep({slot: range(len(feeds[slot])) for slot, count in right.items()})\n",
        (f"{_SELF}::test_guesses_of_another_drafter_save_forwards_and_change_no_draft",),
    ),
    Mutant(
        "the rounded self keeps weights from before they were written to",
        "outpace/targets/stock/rounded.py",
        "        if known is not self.inner._modules or self._live.changed(thorough=False):\n",
        "        if known is None:\n",
        (f"{_SELF}::test_weights_that_change_are_rounded_anew",),
    ),
    Mutant(
        "the rounded self draws its tokens with the noise of another position",
        "outpace/drafters/support/draws.py",
        "            key = signed(self.word(sequence, sequence.output_length, depth, 0))\n",
        "            key = signed(self.word(sequence, sequence.output_length, depth + 1, 0))\n",
        ("tests/unit/drafters/test_draws.py::test_draws_from_the_best_tokens_are_those_from_all",),
    ),
    Mutant(
        "a part is told the path of all parts",
        "outpace/drafters/combined/share.py",
        "        accepted = set(self._whole.path)\n",
        "        accepted = set(range(len(self._whole.draft)))\n",
        ("tests/unit/drafters/test_combined.py::test_each_part_sees_the_fate_of_its_own_nodes",),
    ),
    Mutant(
        "a draft model keeps the rows of rejected guesses",
        "outpace/drafters/support/runner.py",
        "            self.cache.truncate(track.slot, kept, path)\n",
        "            pass\n",
        ("tests/unit/drafters/test_runner.py::test_a_tree_in_several_forwards_is_its_paths",),
    ),
    Mutant(
        "siblings drawn with replacement share their noise",
        "outpace/drafters/support/draws.py",
        "sequence.key.node(Stream.DRAFT, root, first + place) for place in range(count)",
        "sequence.key.node(Stream.DRAFT, root, first) for place in range(count)",
        ("tests/unit/drafters/test_draws.py::test_with_replacement_siblings_are_drawn_each_by_itself",),
    ),
    Mutant(
        "drafts are drawn with the target's noise under a verifier that needs them independent",
        "outpace/drafters/support/draws.py",
        '        return self.noise == "coupled" and sequence.key.coupled\n',
        '        return self.noise == "coupled"\n',
        ("tests/unit/drafters/test_draft_model.py::test_a_verifier_that_needs_independent_drafts_gets_them",),
    ),
    Mutant(
        "a sequence that left keeps its slot of the drafter's cache",
        "outpace/drafters/support/blocks.py",
        "        state.shared.cache.close(state.slot)\n",
        "        pass\n",
        ("tests/unit/drafters/test_block_drafters.py::test_a_sequence_that_leaves_gives_its_slot_back",),
    ),
    Mutant(
        "what a folder brings is taken without a look whether it loads",
        "outpace/engine/usual.py",
        "            return found._replace(drafter=_loaded(found.drafter, target)), ",
        "            return found, ",
        (f"{_BROUGHT}::test_layers_that_cannot_be_used_are_told_once",),
    ),
    Mutant(
        "any layers beyond a model's last one are prediction layers",
        "outpace/drafters/mtp/mtp_checkpoint.py",
        "    return any(_PROJECTION.search(name) and any(",
        "    return any(any(",
        (f"{_BROUGHT}::test_further_layers_alone_are_no_prediction_layers",),
    ),
    Mutant(
        "mtp takes the numbers of a part of the vocabulary for the target's tokens",
        "outpace/drafters/mtp/mtp.py",
        "            vocabulary=part_of(ids, target.vocabulary),\n",
        "",
        (f"{_SMALL}::test_mtp", f"{_SMALL}::test_distributions_are_the_whole_heads_over_the_part"),
    ),
    Mutant(
        "an assistant takes the numbers of a part of the vocabulary for the target's tokens",
        "outpace/drafters/assistant/assistant.py",
        "            vocabulary=part_of(ids, target.vocabulary),\n",
        "",
        (f"{_SMALL}::test_assistants",),
    ),
]

_KIN = "tests/unit/learned/test_dflash_kin.py"
_PLAIN = f"{_KIN}::test_drafts_are_those_of_a_plain_computation"
_PEAGLE = "tests/unit/learned/test_published_peagle.py"
_BLOCK_TREES = "tests/unit/drafters/test_block_drafters.py"
BLOCKS = [
    Mutant(
        "a tree of marginals takes the first candidates of a place, whatever their chances",
        "outpace/drafters/support/shapes.py",
        "math.exp(weight - tree.weight(parent))",
        "0.5",
        (
            "tests/unit/drafters/test_shapes.py::test_marginals_make_the_tree_of_the_most_probable_paths",
            "tests/unit/learned/test_published_dflash.py::test_a_tree_has_the_most_probable_paths",
        ),
    ),
    Mutant(
        "a tree of the likeliest tokens is drafted where distributions are needed",
        "outpace/drafters/support/blocks.py",
        "        return BlockState(sequence, shared.rules_for(sequence), shared.cache.open())\n",
        "        return BlockState(sequence, shared, shared.cache.open())\n",
        (f"{_BLOCK_TREES}::test_sampled_drafts_for_rejection_are_chains_with_distributions",),
    ),
    Mutant(
        "a causal block sees its later rows",
        "outpace/drafters/support/blocks.py",
        "    return mask & (columns <= rows) if causal else mask\n",
        "    return mask\n",
        (f"{_PLAIN} -k jetspec",),
    ),
    Mutant(
        "DSpark's first token is read at a mask",
        "outpace/drafters/blocks/dflash_module.py",
        "int(not further.anchored)",
        "1",
        (f"{_PLAIN} -k specforge",),
    ),
    Mutant(
        "DSpark's state forgets the tokens before the last",
        "outpace/drafters/blocks/dflash_parts.py",
        "                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()\n",
        "                state = torch.zeros_like(state)\n",
        (f"{_PLAIN} -k rnn",),
    ),
    Mutant(
        "DFlash 2's candidates are not weighed by the token before",
        "outpace/drafters/blocks/dflash_parts.py",
        "best + edges.to(best)",
        "best",
        (f"{_PLAIN} -k dflash",),
    ),
    Mutant(
        "DFlash 2's convolution reads the rows after a row",
        "outpace/drafters/blocks/dflash_parts.py",
        "functional.pad(states, (0, 0, tap, 0))[:, :width]",
        "functional.pad(states, (0, 0, 0, tap))[:, -width:]",
        (f"{_PLAIN} -k dflash",),
    ),
    Mutant(
        "the rows of P-EAGLE's masks stay in the cache",
        "outpace/drafters/eagle/peagle.py",
        "        kept.append(width - 1)\n",
        "        kept.append(width - 1 + masks)\n",
        (f"{_PEAGLE}::test_drafts_are_those_of_a_plain_computation",),
    ),
    Mutant(
        "each mask of a PARD follows the text, and not the mask before it",
        "outpace/drafters/models/draft_model.py",
        "[mask] * count, range(-1, count - 1)",
        "[mask] * count, [-1] * count",
        ("tests/unit/drafters/test_masked.py::test_drafts_are_those_of_a_plain_computation",),
    ),
]

LEARNED = [
    Mutant(
        "drafted ids beyond the vocabulary are taken",
        "outpace/drafters/eagle/eagle_module.py",
        "if bool((drafted < 0).any()) or bool((drafted >= size).any()) or",
        "if bool((drafted < 0).any()) or",
        ("tests/unit/test_files.py::test_drafted_ids_beyond_the_vocabulary_are_refused",),
    ),
    Mutant(
        "a prediction layer learns from the same row of the layer before it",
        "outpace_lab/train/modules/mtp.py",
        "                given = F.pad(given[:, :-1], (0, 0, 1, 0))\n",
        "                pass\n",
        ("lab/tests/unit/drafters/test_training_and_drafting.py -k layers",),
    ),
    Mutant(
        "a prediction layer learns without its window",
        "outpace_lab/train/modules/mtp.py",
        "            mask = mask & F.pad(near,",
        "            mask = mask | F.pad(near,",
        ("lab/tests/unit/drafters/test_training_and_drafting.py -k window",),
    ),
]

_FALLBACK = "tests/unit/hf/test_fallback.py"
HF = [
    Mutant(
        "an adapter for each row is decoded as one for all",
        "outpace/hf/__init__.py",
        'sets one for all" * names_adapters(model)',
        'sets one for all" * False',
        (f"{_FALLBACK}::test_an_adapter_for_each_row_is_left_to_transformers",),
    ),
    Mutant(
        "processors see the prompt without its pads",
        "outpace/hf/rows.py",
        "        input_ids = torch.cat([self._pads, input_ids.to(self._pads.device)], dim=1)\n",
        "        input_ids = input_ids.to(self._pads.device)\n",
        (
            "tests/unit/hf/test_rows.py::test_processors_and_criteria_see_the_pads_and_each_criterion_is_called",
        ),
    ),
    Mutant(
        "the returned cache has the row of the last token",
        "outpace/hf/engines.py",
        "    seen = len(sequence.tokens) - 1\n",
        "    seen = len(sequence.tokens)\n",
        ("tests/unit/hf/test_greedy.py::test_caches_of_rows_that_ended",),
    ),
    Mutant(
        "a model that passed with some options is not tested with others",
        "outpace/hf/engines.py",
        "known and _passed.get(model) == (state, fingerprint(model), self._options)",
        "_passed.get(model, [None])[0] == state",
        ("tests/unit/hf/test_accelerate.py::test_other_options_are_tested_anew",),
    ),
]

SERVE = [
    Mutant(
        "a page of another origin may send a form that is read as JSON",
        "outpace/serve/body.py",
        'named == _FORM and "origin" not in request.headers',
        "named == _FORM",
        ("tests/serve/test_errors.py::test_paths_methods_and_types",),
    ),
    Mutant(
        "keys of logit_bias may be of any length",
        "outpace/serve/request.py",
        "token.isascii() and token.isdigit() and len(token) < 10",
        "token.isascii() and token.isdigit()",
        ("tests/serve/test_texts.py::test_what_looks_harmless",),
    ),
    Mutant(
        "a device is read like a file",
        "outpace/files.py",
        "if not stat.S_ISREG(mode):",
        "if stat.S_ISDIR(mode):",
        ("tests/unit/test_plain_files.py -k 'device and (JSON or GGUF)'",),
    ),
    Mutant(
        "the constraint of a batch's first prompt holds for all",
        "outpace/grammars/matching.py",
        "        if self._latest is None or self._latest[0] != wanted:\n",
        "        if self._latest is None:\n",
        ("tests/unit/engine/test_constraints.py -k own_constraints",),
    ),
    Mutant(
        "a list of a body has no bound",
        "outpace/serve/fields.py",
        "Anything = Annotated[list[Any], Field(max_length=_TOKENS, fail_fast=True)]",
        "Anything = list[Any]",
        ("tests/serve/test_bounds.py::test_every_list_and_mapping_has_a_bound",),
    ),
    Mutant(
        "a mapping of a body has no bound",
        "outpace/serve/fields.py",
        "Object = Annotated[dict[str, Any], Field(max_length=_PAIRS)]",
        "Object = dict[str, Any]",
        ("tests/serve/test_bounds.py::test_every_list_and_mapping_has_a_bound",),
    ),
    Mutant(
        "requests of different keys share rows and memories",
        "outpace/serve/request.py",
        'else f"{tenant}:{body.cache_salt}"',
        'else f"{body.cache_salt}"',
        ("tests/serve/test_errors.py::test_keys_share_neither_cached_prompts_nor_what_drafters_remember",),
    ),
    Mutant(
        "a wrong key is accepted",
        "outpace/serve/auth.py",
        "        if not any(equal):\n",
        "        if not equal:\n",
        ("tests/serve/test_errors.py::test_keys",),
    ),
    Mutant(
        "the server is never full",
        "outpace/serve/admission.py",
        "        if not self.total.take(CLIENT.get(), choices):\n",
        "        if not self.total.take(CLIENT.get(), choices, force=True):\n",
        ("tests/serve/test_faults.py::test_overload_is_refused_before_anything_is_tokenised",),
    ),
    Mutant(
        "a ticket gives back its room while its work goes on",
        "outpace/serve/admission.py",
        "        if self._work is not None and not self._work.done():\n",
        "        if self._work is None and self._choices < 0:\n",
        (
            "tests/serve/test_workers.py::test_schemas_without_end_keep_nobody_else_waiting_and_are_counted",
            "tests/serve/test_faults.py -k tokenised",
        ),
    ),
    Mutant(
        "bodies of all requests have no limit together",
        "outpace/serve/body.py",
        "            if not self._bodies.take(self._client, size - self._counted):\n",
        "            if not self._bodies.take(self._client, size - self._counted, force=True):\n",
        ("tests/serve/test_connections.py::test_bodies_count_by_what_has_arrived",),
    ),
    Mutant(
        "one client may hold all of a total",
        "outpace/serve/totals.py",
        "total <= self.most + self.reserve",
        "total <= self.most",
        ("tests/serve/test_totals.py",),
    ),
    Mutant(
        "requests sent ahead are all parsed at once, and refused",
        "outpace/serve/protocol.py",
        "while self._ahead and not (self.pipeline or",
        "while self._ahead and not (len(self.pipeline) > 999 or",
        ("tests/serve/test_http.py::test_a_client_that_leaves_its_pipeline_ends_all_of_it",),
    ),
    Mutant(
        "a request may have two hosts",
        "outpace/serve/protocol.py",
        "if len(hosts) > 1 or",
        "if len(hosts) > 2 or",
        ("tests/serve/test_http.py::test_heads_get_the_status_of_their_mistake",),
    ),
    Mutant(
        "slow masks hold up the steps of others",
        "outpace/engine/scheduler.py",
        "        return rested or ready\n",
        "        return ready\n",
        ("tests/unit/engine/test_work.py::test_masks_of_some_leave_steps_to_others",),
    ),
    Mutant(
        "one client evicts the prefixes of all others",
        "outpace/engine/prefix.py",
        "            if len(self._owned) <= _CLIENTS:\n",
        "            if not self._owned:\n",
        ("tests/unit/engine/test_prefix.py -k evicts_its_own",),
    ),
    Mutant(
        "a worker has no limit of memory",
        "outpace/serve/worker.py",
        "    resource.setrlimit(resource.RLIMIT_AS, (held + more, held + more))\n",
        "",
        ("tests/serve/test_workers.py::test_a_job_past_its_memory_is_refused",),
    ),
    Mutant(
        "tokens that a grammar excludes stay possible",
        "outpace/grammars/matching.py",
        "        return scores.masked_fill(~upload(allowed, scores.device), -torch.inf)\n",
        "        return scores.masked_fill(~upload(allowed, scores.device), -1.0)\n",
        ("tests/serve/test_constraints.py::test_a_schema_is_obeyed_and_what_it_forces_is_drafted",),
    ),
    Mutant(
        "a reference to the whole schema is one to a value's",
        "outpace/serve/pairs.py",
        '    inner = refers(root, ("#/$defs/", "#/definitions/"))\n',
        "    inner = False\n",
        ("tests/serve/test_schemas.py::test_references_to_the_whole_schema_mean_it_in_each_value",),
    ),
    Mutant(
        "tools that are not allowed are shown",
        "outpace/serve/tools.py",
        'return (few, "auto") if mode',
        'return (tools, "auto") if mode',
        ("tests/serve/test_tools.py::test_of_allowed_tools_one_is_called",),
    ),
    Mutant(
        "a forced call that is cut is text",
        "outpace/serve/answers.py",
        "if self._manner.forced and not self.calls and",
        "if False and",
        ("tests/serve/test_calls.py::test_a_forced_call_that_is_cut_is_no_text",),
    ),
    Mutant(
        "a call that the limit has cut is reported as whole",
        "outpace/serve/formats.py",
        'return _CALLED if calls and kind != "limit" else ENDINGS[kind]',
        "return _CALLED if calls else ENDINGS[kind]",
        ("tests/serve/test_histories.py::test_a_call_that_was_cut_off_can_be_sent_back",),
    ),
    Mutant(
        "a job whose process was killed is blamed",
        "outpace/serve/pool.py",
        "            if worker.killed:\n",
        "            if False:\n",
        ("tests/serve/test_workers.py::test_a_worker_that_died_between_two_jobs_is_replaced",),
    ),
    Mutant(
        "nothing is shown before torch is imported",
        "outpace/cli/env.py",
        "        if not given.as_json:  # the next takes seconds\n            show(seen, False, table)\n",
        "",
        ("tests/unit/cli/test_env.py::test_what_needs_no_torch_is_shown_before_it_is_imported",),
    ),
]

OTHERS = [
    Mutant(
        "a library's digest is not compared",
        "outpace/native/packaged.py",
        '    return Path(name).stem.endswith(f"-{digest(data)}")\n',
        "    return bool(data)\n",
        ("tests/unit/native/test_build.py",),
    ),
    Mutant(
        "a folder of libraries may be open to others",
        "outpace/native/build.py",
        "        _check(folder, why_foreign(os.fstat(opened)))\n",
        "        why_foreign(os.fstat(opened))\n",
        ("tests/unit/native/test_build.py::test_a_folder_that_others_may_write_to_is_refused",),
    ),
    Mutant(
        "without descriptors of folders, those above may be open to others",
        "outpace/native/build.py",
        "why_foreign(real.stat()) or why_reachable(real))\n",
        "why_foreign(real.stat()))\n",
        (
            "tests/unit/native/test_build.py::test_without_descriptors_folders_above_may_be_nobody_elses_either",
        ),
    ),
    Mutant(
        "strides of a tensor are not checked before C reads it",
        "outpace/native/pointers.py",
        "tensor.shape != shape or not (tensor.is_contiguous() and tensor.is_cpu):",
        "tensor.shape != shape or not tensor.is_cpu:",
        ("tests/unit/native/test_pointers.py::test_a_tensor_that_is_not_what_a_function_takes_is_refused",),
    ),
    Mutant(
        "a compiled layer cuts numbers off instead of rounding them",
        "outpace/native/numbers.h",
        "    bits even = raw + 0x7fff + ((raw >> 16) & 1);\n",
        "    bits even = raw;\n",
        ("tests/unit/native/test_layers.py::test_a_packed_drafter_is_nearly_the_drafter",),
    ),
    Mutant(
        "a caller does not wait for the chunks of other threads",
        "outpace/native/pool.c",
        "    if (own < (uint64_t)chunks && join(",
        "    if (!chunks && join(",
        ("tests/unit/native/test_pool.py::test_the_pool",),
    ),
    Mutant(
        "a fork believes that it has the threads of the process before it",
        "outpace/native/pool.c",
        "    pthread_atfork(NULL, NULL, begin_anew);\n",
        "",
        ("tests/unit/native/test_pool.py::test_the_pool",),
    ),
    Mutant(
        "a caller publishes its work while another's is being done",
        "outpace/native/pool.c",
        " || atomic_exchange(&pool.taken, 1)) {",
        ") {",
        ("tests/unit/native/test_pool.py::test_the_pool",),
    ),
    Mutant(
        "memory of weights is handed out twice",
        "outpace/native/memory.py",
        "self._rest[:size], self._rest[whole:]",
        "self._rest[:size], self._rest[whole // 2 :]",
        ("tests/unit/native/test_memory.py::test_no_two_tensors_share_a_byte",),
    ),
    Mutant(
        "logits in float32 are shifted into another half",
        "outpace/native/draw.c",
        "(uint32_t)job->given[i] << 16;",
        "(uint32_t)job->given[i] << 15;",
        ("tests/unit/native/test_draw.py::test_rows_in_float32",),
    ),
    Mutant(
        "a thread leaves out the last panel of a chunk",
        "outpace/native/products.h",
        "end = (chunk + 1) * job->each;",
        "end = (chunk + 1) * job->each - 1;",
        ("tests/unit/native/test_shared.py::test_products",),
    ),
    Mutant(
        "the record of a GGUF file holds for any other of its size",
        "outpace/targets/llamacpp/findings.py",
        '        "file": digest([_sampled(part) for part in parts_of(path)]),\n',
        "",
        ("tests/unit/targets/test_llama_findings.py::test_a_changed_file_is_another",),
    ),
    Mutant(
        "recorded self-tests are believed of other weights",
        "outpace/targets/step/record.py",
        '    if not isinstance(found, dict) or found.get("key") != key or',
        "    if not isinstance(found, dict) or",
        ("tests/unit/targets/test_record.py::test_an_answer_to_something_else_is_ignored",),
    ),
]

_STATES = "tests/unit/targets/test_states.py"
_SLOTS = "tests/unit/cache/test_states.py"
_PREFIXES = "tests/zoo/test_recurrent.py::test_shared_prefixes"

RECURRENT = [
    Mutant(
        "a node starts from the state of a sibling of its parent",
        "outpace/targets/inputs/state_rows.py",
        "parents[level.parents]\n",
        "parents[(level.parents + 1) % len(parents)]\n",
        (f"{_STATES}::test_a_tree_has_the_logits_of_its_paths -k qwen3-next",),
        untested=True,
    ),
    Mutant(
        "a convolution sees the previous row, not the parent",
        "outpace/targets/inputs/state_rows.py",
        "paths[parent] if parent >= 0 else",
        "paths[node - 1] if node else",
        (f"{_STATES}::test_a_tree_has_the_logits_of_its_paths -k lfm2",),
        untested=True,
    ),
    Mutant(
        "a state is committed one node too far",
        "outpace/targets/inputs/state_rows.py",
        "            level, index = self.where[sequence][node]\n",
        "            level, index = self.where[sequence][min(node + 1, len(self.where[sequence]) - 1)]\n",
        (f"{_STATES}::test_a_tree_has_the_logits_of_its_paths -k jamba",),
        untested=True,
    ),
    Mutant(
        "the chunks of a prompt are counted from the last cut, not from its start",
        "outpace/targets/inputs/state_rows.py",
        "            if (start + row) % size:\n",
        "            if row % size:\n",
        (f"{_STATES}::test_chunks_begin_at_multiples",),
        untested=True,
    ),
    Mutant(
        "a shared state is one block too young",
        "outpace/engine/prefix.py",
        "            last = self._blocks[keys[-1]]\n",
        "            last = self._blocks[keys[-2:][0]]\n",
        (f"{_PREFIXES} -k qwen3-next",),
    ),
    Mutant(
        "a prefix is taken up to a block without a state",
        "outpace/engine/prefix.py",
        "            found.pop()\n",
        "            break\n",
        (f"{_PREFIXES} -k qwen3-next",),
    ),
    Mutant(
        "a slot begins with the states of the one before it",
        "outpace/cache/states.py",
        "            state[last] = 0\n",
        "            pass\n",
        (_SLOTS,),
    ),
    Mutant(
        "states of a window that skips places are kept in a copy",
        "outpace/cache/states.py",
        "before = self._states_of(seat)[index][seat.place]",
        "before = window.states(index)[sequence]",
        (_SLOTS,),
    ),
    Mutant(
        "states stay behind when their slot moves to another lane",
        "outpace/cache/states.py",
        "            new[len(self.seats)] = before[place]\n",
        "            pass\n",
        (_SLOTS,),
    ),
]


_QUANTS = "tests/unit/targets/test_quants.py"
_GGUF = "tests/unit/targets/test_gguf_file.py"

QUANTS = [
    Mutant(
        "the least numbers of K-types are added, not subtracted",
        "outpace/native/quant_products.h",
        "as.least < 0 ? -least * wholes_of",
        "as.least < 0 ? least * wholes_of",
        (f"{_QUANTS}::test_products_are_those_of_rounded_rows",),
    ),
    Mutant(
        "rows of queries and keys of a GGUF file stay in llama.cpp's order",
        "outpace/targets/gguf/mapping.py",
        "return None if np.array_equal(found, own) else",
        "return None if found is not None else",
        (f"{_GGUF}::test_a_file_is_the_model_that_it_was_written_from",),
    ),
    Mutant(
        "a layer of a GGUF file whose inputs have another order gets them in the model's",
        "outpace/targets/gguf/modules.py",
        "self.linear(states[..., self.order])",
        "self.linear(states)",
        (f"{_GGUF}::test_other_families_run_on_transformers_steps_with_the_files_weights",),
    ),
    Mutant(
        "what a row's experts give is not weighed",
        "outpace/targets/gguf/modules.py",
        " * weights[places, ranks, None])",
        ")",
        (f"{_GGUF}::test_other_families_run_on_transformers_steps_with_the_files_weights",),
    ),
    Mutant(
        "a setting of a GGUF file that the config leaves out is ignored",
        "outpace/targets/gguf/settings.py",
        "        if take is None or not take(config, left[name]):\n",
        "        if take is not None and not take(config, left[name]):\n",
        (f"{_GGUF}::test_a_setting_that_the_config_leaves_out_is_refused",),
    ),
    Mutant(
        "Gemma's queries are scaled by the config's default, whatever the size of a head",
        "outpace/targets/gguf/settings.py",
        "if (layers := _WIDE_QUERIES.get(config.model_type)) is not None:",
        "if (layers := _WIDE_QUERIES.get(config.model_type)) == 0:",
        (f"{_GGUF}::test_a_file_is_the_model_that_it_was_written_from",),
    ),
    Mutant(
        "a row's bits depend on how many rows are multiplied with it",
        "outpace/native/quant_products.h",
        "const float by = beside[row].scale;",
        "const float by = beside[row].scale + (count > 1 ? 1e-9f : 0);",
        (f"{_QUANTS}::test_a_row_has_the_same_bits_among_any_rows",),
    ),
]


MUTANTS = [
    *QUANTS,
    *CACHE,
    *TREES,
    *DRAWS,
    *SEQUENCE,
    *VERIFY,
    *ENGINE,
    *TARGETS,
    *DRAFTERS,
    *BLOCKS,
    *LEARNED,
    *HF,
    *SERVE,
    *OTHERS,
    *RECURRENT,
]

"""A sequence being decoded: its tokens, when it ends, and its draws at each step.

A sequence draws, so it is above the modules of drawing; types of plain data are in ``core``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.cache import Place
from outpace.core import (
    Draft,
    FinishReason,
    Generation,
    NoTokenLeft,
    OutpaceError,
    SamplingParams,
    Source,
    Stats,
    StoppedBy,
    TokenLogprobs,
)
from outpace.draws.logits import DrawnTokens, Logits
from outpace.draws.many_rows import NO_TOKEN
from outpace.draws.noise import NO_TOKEN_LEFT, Key, Stream, noisy_argmax, uniform
from outpace.draws.own_tokens import Tree, guess
from outpace.draws.sampling import Processor, best_token, warp
from outpace.text import TextStream
from outpace.transfer import widened
from outpace.tree import depths


class Sequence:
    """A prompt and its output so far.

    Args:
        prompt: token ids, at least one.
        params: how to decode it.
        key: key of its draws.
        limit: output tokens allowed by ``max_new_tokens`` and the context.
        eos_token_ids: tokens that end it; empty if the parameters ignore them.
        text: decoder of the output, if there is a tokenizer.
        criteria: called with prompt and output after each token; True ends the sequence.
        references: texts that the output may repeat, for drafters that copy.
        output: tokens emitted earlier, if decoding is resumed: indices, penalties and stop strings take them
            into account; ``stats`` and ``logprobs`` begin after them.
        source: the input that an encoder-decoder model decodes it from. If its tokens are of the decoder's
            vocabulary, they are the first of ``references``: a correction or a summary repeats its source.
        priority: sequences with higher priority join first and are preempted last.
        salt: it shares cached rows only with sequences that have the same salt.
        client: whose it is.
    """

    def __init__(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        key: Key,
        limit: int,
        eos_token_ids: frozenset[int] = frozenset(),
        text: TextStream | None = None,
        criteria: Callable[[list[int]], bool] | None = None,
        references: Seq[Seq[int]] = (),
        output: Seq[int] = (),
        source: Source | None = None,
        priority: int = 0,
        salt: str | None = None,
        client: str = "",
    ) -> None:
        self.prompt_length = len(prompt)
        self.tokens = [*prompt, *output]
        self.params = params
        self.key = key
        self.limit = limit
        self.eos_token_ids = eos_token_ids
        self.text = text
        self.criteria = criteria
        self.source = source
        self.priority = priority
        self.salt = salt
        self.client = client
        self.references = (source.tokens, *references) if source is not None and source.tokens else references
        # Maximum number of nodes of the next draft, if known, so that a drafter need not make more.
        self.budget: int | None = None
        # Time of each further node of a draft as a share of a plain step, if measured.
        self.row_cost: float | None = None
        # Seconds of a plain step, per sequence of the batch, if measured.
        self.plain_seconds: float | None = None
        # Whether the prompt's hidden states are still to be read, in the forward of the next step.
        self.prompt_unread = False
        # Whether the next draft should leave out nodes that pay only in later steps.
        self.narrow = False
        # Its place in the target's cache while it is decoded, for drafters that draft with the target.
        self.place: Place | None = None
        self.processor = Processor(params, prompt)
        self.stats = Stats()
        self.logprobs: list[TokenLogprobs] = []
        # The step, from 1, that emitted each output token; 0 for tokens emitted before decoding was resumed.
        self.steps: list[int] = [0] * len(output)
        # Every token that ends the sequence: drafting beyond one is useless.
        self.stop_tokens = eos_token_ids.union(params.stop_token_ids)
        self.stopped_by = StoppedBy("limit") if self.room <= 0 else None
        self.error: Exception | None = None  # set if it is what ended the sequence
        for token in output:
            self.processor.observe(token)
            if text is not None and text.push(token):
                self.stopped_by = StoppedBy("stop string", text.stopped_by)

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_length]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def finish_reason(self) -> FinishReason | None:
        """What ended it, in a word; None while it is decoded."""
        return None if self.stopped_by is None else self.stopped_by.reason

    @property
    def room(self) -> int:
        """Output tokens still allowed."""
        return self.limit - self.output_length

    def within_reach(self, depth: int) -> int:
        """The depth limited to what could be accepted and to the budget."""
        depth = min(depth, self.room - 1)
        return depth if self.budget is None else min(depth, self.budget)

    def append(self, token: int) -> bool:
        """Commit a token; False if the sequence ends with it."""
        self.tokens.append(token)
        self.steps.append(self.stats.steps + 1)
        self.processor.observe(token)
        self.stopped_by = self._ended_by(token)
        return self.stopped_by is None

    def _ended_by(self, token: int) -> StoppedBy | None:
        if token in self.eos_token_ids:  # which is not in the text, nor is a stop token
            return StoppedBy("end token")
        if token in self.params.stop_token_ids:
            return StoppedBy("stop token")
        if self.text is not None and self.text.push(token):
            return StoppedBy("stop string", self.text.stopped_by)
        if self.criteria is not None and self.criteria(self.tokens):
            return StoppedBy("criterion")
        return StoppedBy("limit") if self.room <= 0 else None

    def fail(self, error: Exception) -> None:
        """End the sequence with an error. Of several errors the first is kept."""
        if self.error is None:
            self.error, self.stopped_by = error, StoppedBy("error")

    def check(self) -> None:
        """Raise the error that ended the sequence, if there is one."""
        if self.error is not None:
            raise self.error

    def tree(self, draft: Draft, first: int, top: int = 0) -> Tree:
        """This sequence's tree in a forward.

        Args:
            first: the row of its root.
            top: most probable tokens wanted after each node.
        """
        return Tree(first, draft, self.processor, self.key, self.output_length, top)

    def generation(self) -> Generation:
        """The result of a sequence that has ended.

        Raises:
            OutpaceError: it has not ended.
        """
        if self.stopped_by is None:
            raise OutpaceError("the sequence is still being decoded: step the engine, or remove it")
        if self.text is not None and self.error is None:  # the error may be the tokenizer's
            self.text.release(final=True)
        return Generation(
            tokens=self.output,
            stopped_by=self.stopped_by,
            seed=self.key.seed,
            stats=self.stats,
            text=None if self.text is None else self.text.text,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            error=self.error,
        )


class KeyedDraw:
    """The draws of one sequence at one step, all keyed by its seed (the verifiers' ``Draw``).

    Draft, accept and residual draws are keyed by the output index of this step's root and by the node; the
    target's own draw by its output index alone, so that it is the same in every step that reaches it.

    Args:
        own: node -> the target's own token after it, for nodes that ``draws.own_tokens`` has computed.
    """

    def __init__(self, sequence: Sequence, own: Mapping[int, int] | None = None) -> None:
        self.sequence = sequence
        self._own = own or {}
        self.root = sequence.output_length
        self._latest: tuple[int, Tensor] | None = None

    def _scores(self, logits: Logits, node: int, guessed: Seq[int] = ()) -> Tensor:
        """Processed scores after ``node``, shape [vocabulary].

        The result is cached, so that processors run once per emitted token even if a verifier draws several
        times at a node.
        """
        sequence = self.sequence
        if guessed:
            if sequence.params.logits_processors:
                raise OutpaceError(
                    "logits_processors see emitted tokens only, and this verifier needs distributions "
                    "after tokens that are not emitted yet; use verifier='match' or 'rejection'"
                )
            return warp(sequence.processor.adjust(logits[node], guessed), sequence.params)
        if self._latest is None or self._latest[0] != sequence.output_length:
            self._latest = sequence.output_length, sequence.processor(logits[node], sequence.tokens)
        return self._latest[1]

    @property
    def greedy(self) -> bool:
        return self.sequence.params.greedy

    def token(self, logits: Logits, node: int) -> int:
        """The target's own token after ``node``, the last of the path emitted so far."""
        sequence = self.sequence
        if sequence.params.greedy:
            return self._best(logits, node)
        if node in self._own:
            return _checked(self._own[node])
        return noisy_argmax(self._scores(logits, node), sequence.key.target(sequence.output_length))

    def _best(self, logits: Logits, node: int, guessed: Seq[int] = ()) -> int:
        if node in self._own:
            return _checked(self._own[node])
        plain = self.sequence.processor.plain
        scores = logits[node] if plain else self._scores(logits, node, guessed)
        return best_token(scores)

    def distribution(self, logits: Logits, node: int, guessed: Seq[int] = ()) -> Tensor:
        """The target's processed distribution after ``node``, float64, shape [vocabulary]; see ``Draw``."""
        if self.sequence.params.greedy:
            point = torch.zeros(logits[node].shape, dtype=torch.float64)  # on the host, whatever its device
            point[self._best(logits, node, guessed)] = 1.0
            return point
        q = self._scores(logits, node, guessed).double().softmax(dim=-1)
        if not torch.isfinite(q.sum()):
            raise NoTokenLeft(NO_TOKEN_LEFT)
        return q

    def logprobs(self, logits: Logits, node: int) -> Tensor:
        """Processed log probabilities after ``node``, at temperature 1 if greedy; float64, [vocabulary]."""
        return self._scores(logits, node).double().log_softmax(dim=-1)

    def draft(
        self, row: Tensor, guessed: Seq[int], node: int, coupled: bool = True
    ) -> tuple[int, Tensor | None]:
        """A drafted token, and the distribution it was drawn from, float64, shape [vocabulary].

        The sequence's parameters apply, except its ``logits_processors``, which see emitted tokens only.
        If greedy, the token is a point mass and the distribution is None.

        Args:
            row: the draft model's logits after the text and ``guessed``, shape [vocabulary].
            guessed: tokens drafted on the path to this one.
            node: the token's node in the draft.
            coupled: draw with the target's own noise if the verifier allows it; otherwise with the draft's.
        """
        sequence = self.sequence
        scores = warp(sequence.processor.adjust(row, guessed), sequence.params)
        if sequence.params.greedy:
            return int(scores.argmax()), None
        scores = widened(scores)
        if coupled and sequence.key.coupled:
            word = sequence.key.target(self.root + len(guessed))
        else:
            word = sequence.key.node(Stream.DRAFT, self.root, node)
        return noisy_argmax(scores, word), scores.softmax(dim=-1)

    def accept(self, probability: float, node: int) -> bool:
        """True with this probability."""
        return uniform(self.sequence.key.node(Stream.ACCEPT, self.root, node)) < probability

    def choose(self, distribution: Tensor, node: int) -> int:
        """A token drawn from a distribution or from non-negative weights, shape [vocabulary]."""
        weights = widened(distribution)
        left = weights.nonzero().squeeze(1)  # the logarithm of a whole vocabulary takes long
        if not len(left):
            raise NoTokenLeft(NO_TOKEN_LEFT)
        word = self.sequence.key.node(Stream.RESIDUAL, self.root, node)
        return int(left[noisy_argmax((weights[left] / weights.sum()).log(), word, left)])

    def emit(self, token: int, logits: Logits, node: int) -> bool:
        """Commit the token that follows ``node``; False if the sequence ends with it."""
        sequence = self.sequence
        if sequence.params.logprobs is not None:
            row = logits[node].float().log_softmax(dim=-1)
            sequence.logprobs.append(TokenLogprobs.of(row, token, sequence.params.logprobs))
        return sequence.append(token)


def _checked(token: int) -> int:
    if token == NO_TOKEN:
        raise NoTokenLeft(NO_TOKEN_LEFT)
    return token


@dataclass(frozen=True)
class Step:
    """Outcome of one forward of the target for one sequence; drafters learn from it.

    Attributes:
        draft: the tree that was verified: the proposal, trimmed to the tokens still allowed.
        kept: for each node of ``draft``, its node in the proposal.
        path: accepted nodes of ``draft``.
        tokens: emitted tokens, the bonus included.
        logits: the target's rows, root first.
        root: output index of the token that follows the root.
        sequence: the sequence, which already contains ``tokens``.
        hidden: layer -> hidden states of the rows, root first, for the layers that the drafter or an observer
            requests.
        committed: layer -> hidden states of the rows that this step committed, the root's and those of the
            accepted nodes, including nodes that another drafter proposed.
        own: node -> the target's own token after it, as far as the step has found them.
    """

    draft: Draft
    kept: Seq[int]
    path: list[int]
    tokens: list[int]
    logits: Logits
    root: int
    sequence: Sequence
    hidden: Mapping[int, Tensor]
    committed: Mapping[int, Tensor] = field(default_factory=dict)
    own: Mapping[int, int] = field(default_factory=dict)

    @property
    def depths(self) -> list[int]:
        """Depth of each node of the draft; a child of the root has depth 0."""
        return depths(self.draft.parents)

    def refill(self, nodes: Seq[int], argmax: bool = False) -> list[int]:
        """The target's own keyed draws after these nodes (-1 is the root), as guesses of what it will emit.

        With ``argmax``, or if the sequence is greedy, the target's most probable tokens.
        """
        if not nodes:
            return []
        if isinstance(self.logits, DrawnTokens):
            return self.logits.drawn(nodes, argmax)
        if self.sequence.processor.plain and all(node in self.own for node in nodes):
            return [max(self.own[node], 0) for node in nodes]  # where there is no token, any guess will do
        params = SamplingParams() if argmax else self.sequence.params
        depth = [*self.depths, -1]  # the root is the last entry, so index -1 maps to it
        indices = [self.root + depth[node] + 1 for node in nodes]
        return guess(self.logits.gather(nodes), indices, params, self.sequence.key)

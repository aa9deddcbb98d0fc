"""The text of one request, decoded block by block while the document in front of it changes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.core import Generation, SamplingParams
from outpace.engine.engine import Engine
from outpace.sequence import Sequence
from outpace_lab.ralm.stats import RalmStats


class Answer:
    """A prefix and its output, each block of ``stride`` tokens decoded with a document in front.

    While the document stays the same the engine decodes one sequence, which may run ahead of the requested
    block. A different document, or a cut, starts a new sequence that continues the output so far; its draws
    depend on the output indices alone and are therefore the same.

    Args:
        engine: decodes; it may contain other sequences.
        documents: token ids of each document.
        prefix: token ids between the document and the output.
        params: must have a seed.
        stride: tokens per block.
        stats: of the request; updated.
    """

    def __init__(
        self,
        engine: Engine,
        documents: Seq[Seq[int]],
        prefix: list[int],
        params: SamplingParams,
        stride: int,
        stats: RalmStats,
    ) -> None:
        self._engine = engine
        self._texts = documents
        self._prefix = prefix
        self._params = params
        self._stride = stride
        self._stats = stats
        self._sequence: Sequence | None = None
        self.documents: list[int] = []  # of each block
        self.output: list[int] = []

    @property
    def text(self) -> list[int]:
        """Token ids of prefix and output."""
        return self._prefix + self.output

    @property
    def ended(self) -> bool:
        sequence = self._sequence
        if sequence is None:
            return self._params.max_new_tokens == 0
        return sequence.finish_reason is not None and sequence.output_length <= len(self.output)

    def fits(self, document: int) -> bool:
        """True if document and prefix fit into the target's context."""
        context = self._engine.target.context
        return context is None or len(self._texts[document]) + len(self._prefix) <= context

    def extend(self, document: int) -> None:
        """Decode the next block with this document in front.

        Raises:
            ContextOverflow: document and prefix do not fit the target's context.
        """
        if self._sequence is None or self.documents[-1] != document:
            self._begin(document)
        sequence = self._sequence
        assert sequence is not None
        end = len(self.output) + self._stride
        while sequence.finish_reason is None and sequence.output_length < end:
            self._engine.step()
        sequence.check()
        self.output = sequence.output[:end]
        self.documents.append(document)

    def _begin(self, document: int) -> None:
        self.leave()
        text = self._texts[document]
        # The output often copies from its document.
        references = [text] if self._engine.drafter.reads_references else []
        self._sequence = self._engine.add(
            [*text, *self._prefix], self._params, references=references, output=self.output
        )
        self._stats.prompts += 1

    def cut(self, blocks: int) -> None:
        """Undo all but the first ``blocks`` blocks."""
        self.leave()
        self.documents = self.documents[:blocks]
        self.output = self.output[: blocks * self._stride]

    def leave(self) -> None:
        """Remove the sequence from the engine."""
        if self._sequence is not None:
            self._engine.remove(self._sequence)
            self._stats.steps += self._sequence.stats.steps
            self._sequence = None

    def generation(self) -> Generation:
        """The result of the last sequence; call it after the answer has ended."""
        if self._sequence is None:
            # No token was allowed, so no sequence was made; let the engine check the request all the same.
            self._sequence = self._engine.add(self._prefix, self._params)
        return self._sequence.generation()

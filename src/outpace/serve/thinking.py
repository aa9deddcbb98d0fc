"""Reasoning at the beginning of an answer: its grammar, its budget, and the number of its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.loading import Loaded
from outpace.serve.calls import split_by_marks
from outpace.serve.dialogue import Dialogue

_LAST = 8  # tokens at a prompt's end, among which a mark of reasoning may be
_FIRST = 32  # tokens of an answer, among which the mark that begins reasoning is
_ANALYSIS, _END = "<|channel|>analysis<|message|>", "<|end|>"  # of harmony
_ASSISTANT, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"


@dataclass(frozen=True)
class ReasoningPart:
    """The reasoning that an answer may begin with.

    Attributes:
        begin, end: the marks around it.
        begun: the prompt has the first mark already.
        again: there may be more of it, after its end.
        closing: what ends it, once the budget is spent.
        budget: maximum number of tokens between the marks; None for no limit.
        prefix: a grammar in which it may stand before something else, ``@body``.
    """

    begin: str
    end: str
    begun: bool
    again: bool
    closing: str
    budget: int | None
    prefix: str

    def first(self, model: Loaded, tokens: Seq[int]) -> int | None:
        """The place of the first token of reasoning in an answer; None if it does not begin with any."""
        if self.begun:
            return 0
        for place in range(1, min(_FIRST, len(tokens)) + 1):
            if _text(model, tokens[:place]).lstrip().startswith(self.begin):
                return place
        return None

    def count(self, model: Loaded, tokens: Seq[int]) -> int:
        """The number of tokens of reasoning in an answer, without its marks."""
        tokens = tokens[:-1] if tokens and tokens[-1] in model.target.eos_token_ids else tokens
        text, sizes = _text(model, tokens), range(len(tokens) + 1)

        def at(place: int) -> int:
            return bisect_left(sizes, place, key=lambda size: len(_text(model, tokens[:size])))

        return sum(at(stop) - at(start) for start, stop in self._spans(text))

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where reasoning begins and ends in the text of an answer."""
        if self.begun:
            start = 0
        elif text.lstrip().startswith(self.begin):
            start = text.index(self.begin) + len(self.begin)
        else:
            return
        while True:
            stop = text.find(self.end, start)
            yield start, len(text) if stop < 0 else stop
            following = text.find(self.begin, stop) if self.again and stop >= 0 else -1
            if following < 0:
                return
            start = following + len(self.begin)


def reasoning_of(
    model: Loaded,
    dialogue: Dialogue,
    prompt: Seq[int],
    budget: int | None,
    *,
    free: bool,
    tools: bool,
    called: bool,
) -> ReasoningPart | None:
    """The reasoning that an answer to a prompt may begin with; None for none.

    Args:
        free: the answer is any text: it may reason again where the prompt has ended it.
        tools: the answer may call functions. called: it must.
    """
    if not model.has_template or not dialogue.thinks:
        return None
    begin, end = dialogue.thought or (_ANALYSIS, _END)
    said = str(model.tokenizer.decode(list(prompt[-_LAST:]))).rstrip()
    if said.endswith(end) and not (free or dialogue.harmony):
        return None
    begun = said.endswith(begin)
    closing = end if tools or not dialogue.harmony else f"{end}{_ASSISTANT}{_FINAL}"
    eos = sorted(model.target.eos_token_ids)
    prefix = _prefix(dialogue, begin, end, begun, called, eos)
    return ReasoningPart(begin, end, begun, dialogue.harmony, closing, budget, prefix)


def _prefix(dialogue: Dialogue, begin: str, end: str, begun: bool, called: bool, eos: Seq[int]) -> str:
    """Reasoning, and then ``@body``: any tokens but those that end the answer, up to the mark."""

    def terms(text: str) -> str:
        return " ".join(split_by_marks(text, list(dialogue.tokens), dialogue.term))

    if end in dialogue.tokens:
        none = ",".join(map(str, sorted({*eos, dialogue.tokens[end]})))
        rules = f"thought: (<[^{none}]>)* {terms(end)}"
    else:
        rules = f"thought[suffix={terms(end)}]: /(?s:.*)/"
    if dialogue.harmony:
        body = "@body" if called else f"{terms(_FINAL)} @body"
        return f"start: ({terms(begin)} thought {terms(_ASSISTANT)})? {body}\n{rules}"
    thought = "thought blank" if begun else f"({terms(begin)} thought blank)?"
    return f"start: {thought} @body\nblank: /\\n{{0,2}}/\n{rules}"


def _text(model: Loaded, tokens: Seq[int]) -> str:
    return str(model.tokenizer.decode(list(tokens), skip_special_tokens=False))


class Budget:
    """A logits processor that ends reasoning once its tokens are as many as it may have.

    Args:
        prompt_length: number of tokens before the output.
    """

    def __init__(self, model: Loaded, reasoning: ReasoningPart, prompt_length: int) -> None:
        self._model, self._reasoning, self._prompt = model, reasoning, prompt_length
        self._closing = model.plain_tokens(reasoning.closing)
        self._first: int | None = None
        self._closed = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Exclude all tokens but the next one that ends the reasoning, if it must end here."""
        forced = None if self._closed else self._next(input_ids[0, self._prompt :].tolist())
        if forced is None:
            return scores
        alone = torch.full_like(scores, -torch.inf)
        alone[..., forced] = 0.0
        return alone

    def _next(self, tokens: list[int]) -> int | None:
        """The token that must follow; None for any."""
        model, reasoning = self._model, self._reasoning
        if self._first is None:
            self._first = reasoning.first(model, tokens)
            if self._first is None:
                self._closed = len(tokens) >= _FIRST
                return None
        over = len(tokens) - self._first - (reasoning.budget or 0)
        window = tokens[self._first :][-len(reasoning.end) - 1 :]  # as many as the mark may be
        ended = over <= 0 and reasoning.end in _text(model, window)
        self._closed = ended or over >= len(self._closing)
        return None if self._closed or over < 0 else self._closing[over]

"""Token ids of a suite's prompts for the model that is measured."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.bench.items import Item, Suite
from outpace.core import ContextOverflow, OutpaceError
from outpace.loading import Loaded
from outpace.reading import token_ids


def encode(subject: Loaded, item: Item, answers: Seq[Seq[int]] = ()) -> list[int]:
    """Token ids of an item's next prompt: its turns so far, with the answers in between."""
    if item.tokens:
        return list(item.tokens)
    if not item.chat:
        return subject.tokens(item.turns[0])
    messages = [{"role": "user", "content": item.turns[0]}]
    for turn, answer in zip(item.turns[1:], answers, strict=False):
        messages.append({"role": "assistant", "content": spoken(subject, answer)})
        messages.append({"role": "user", "content": turn})
    return conversation(subject, messages)


def conversation(subject: Loaded, messages: Seq[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to the beginning of the next answer; its length is not limited.

    It is formatted by the model's chat template, or, without one, as lines that begin with ``User:`` and
    ``Assistant:``.
    """
    if subject.has_template:
        return subject.encode_chat(messages)
    names = {"system": "System", "user": "User", "assistant": "Assistant"}
    lines = [f"{names[message['role']]}: {message['content']}" for message in messages]
    return subject.tokens("\n".join([*lines, "Assistant:"]))


def spoken(subject: Loaded, answer: Seq[int], strip: bool = True) -> str:
    """The text of an answer up to the first end token, by default without white space around it."""
    ends = subject.target.eos_token_ids
    until = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    text: str = subject.tokenizer.decode(list(answer[:until]), skip_special_tokens=True)
    return text.strip() if strip else text


def references(subject: Loaded, item: Item) -> list[list[int]]:
    """Token ids of an item's references, with a leading space, since outputs begin after a colon."""
    return [subject.plain_tokens(" " + text) for text in item.references]


def _is_too_long(subject: Loaded, item: Item, context: int) -> bool:
    """True for an item with a turn that is far longer than a context, found without reading it to its end."""
    try:
        for turn in item.turns:
            if len(turn) > context:
                token_ids(subject.tokenizer, turn, most=context)
    except ContextOverflow:
        return True
    return False


def fitting(subject: Loaded, suite: Suite, new_tokens: int) -> Suite:
    """Leave out the items that do not fit the model's context with all their answers.

    Raises:
        OutpaceError: no item fits, or an item has no tokens or one outside the model's vocabulary.
    """
    # The source of an encoder-decoder model does not count as its decoder's text.
    context = None if subject.target.has_encoder else subject.target.context
    kept = []
    for item in suite.items:
        if context is not None and _is_too_long(subject, item, context):
            continue
        prompt = encode(subject, item, [()] * (item.rounds - 1))
        if not prompt or not all(0 <= token < subject.target.vocabulary for token in prompt):
            raise OutpaceError(
                f"{suite.name}, prompt {item.id}: "
                + ("it has no tokens" if not prompt else "it has token ids outside the model's vocabulary")
            )
        if context is None or len(prompt) + item.rounds * new_tokens <= context:
            kept.append(item)
    if not kept:
        raise OutpaceError(
            f"no prompt of {suite.name} fits the model's context of {context} tokens with {new_tokens} new "
            "ones; give another --suite or a smaller --max-new-tokens"
        )
    return Suite(suite.name, tuple(kept), suite.source, suite.left_out + len(suite.items) - len(kept))

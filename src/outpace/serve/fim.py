"""Prompts that ask a model to fill in the middle, by the marks that its tokenizer has for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outpace.reading import marks_of

Read = Callable[[str, bool], Awaitable[list[int]]]


@dataclass(frozen=True)
class Family:
    """The marks of a family of models, in the order that these were trained with.

    Attributes:
        prefix, suffix, middle: before each part; "" for none.
        first: the suffix comes first.
        file, repository: before a file's name, and a repository's; of some.
        ends: what ends an answer besides the model's own end tokens.
    """

    prefix: str
    suffix: str
    middle: str
    first: bool = False
    file: str = ""
    repository: str = ""
    ends: tuple[str, ...] = ()


def _with_files(prefix: str, file: str, repository: str) -> Family:
    suffix, middle, pad = (prefix.replace("prefix", part) for part in ("suffix", "middle", "pad"))
    return Family(prefix, suffix, middle, file=file, repository=repository, ends=(pad, file, repository))


FAMILIES = (
    _with_files("<|fim_prefix|>", "<|file_sep|>", "<|repo_name|>"),  # Qwen-Coder
    _with_files("<|fim_prefix|>", "<|file_separator|>", ""),  # CodeGemma
    _with_files("<fim_prefix>", "<file_sep>", "<repo_name>"),  # StarCoder 2
    _with_files("<fim_prefix>", "", "<reponame>"),  # StarCoder, Granite
    _with_files("<fim-prefix>", "", ""),  # SantaCoder
    Family("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ends=("\u2581<EOT>",)),  # CodeLlama
    Family(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),  # DeepSeek
    Family("[PREFIX]", "[SUFFIX]", "", first=True),  # Codestral
)


@dataclass(frozen=True)
class Middle:
    """The marks of one tokenizer, as token ids.

    Attributes:
        begin: what begins every text.
        marks: all marks of the tokenizer, none of which a text may become.
    """

    family: Family
    ids: dict[str, int]
    begin: tuple[int, ...]
    marks: dict[str, int]

    @classmethod
    def of(cls, tokenizer: Any, begin: Seq[int]) -> Middle | None:
        """The marks of a tokenizer; None if it has none.

        Args:
            begin: token ids of an empty text.
        """
        named = tokenizer.get_vocab()
        known = [
            family
            for family in FAMILIES
            if all(mark in named for mark in (family.prefix, family.suffix, family.middle) if mark)
        ]
        if not known:
            return None
        family = max(known, key=lambda one: (one.file in named) + (one.repository in named))
        marks = (family.prefix, family.suffix, family.middle, family.file, family.repository, *family.ends)
        ids = {mark: int(named[mark]) for mark in marks if mark and mark in named}
        bos = getattr(tokenizer, "bos_token_id", None)
        first = tuple(token for token in begin[:1] if token == bos)
        return cls(family, ids, first, marks_of(tokenizer) | ids)

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer."""
        return [self.ids[mark] for mark in self.family.ends if mark in self.ids]

    def _mark(self, mark: str) -> list[int]:
        return [self.ids[mark]] if mark in self.ids else []

    async def prompt(
        self, read: Read, prefix: str | Seq[int], suffix: str, files: Seq[tuple[str, str]] = ()
    ) -> list[int]:
        """Token ids of the prompt of what is between two texts.

        Args:
            read: reads a text without making marks of it, given whether it begins one.
            prefix: the text before, or its token ids.
            files: names and texts of further files.
        """
        family = self.family
        before = await read(prefix, True) if isinstance(prefix, str) else list(prefix)
        behind = await read(suffix, False)
        parts = [[*self._mark(family.prefix), *before], [*self._mark(family.suffix), *behind]]
        if family.first:
            parts.reverse()
        shown = await self._shown(read, files) if files else []
        return [*self.begin, *shown, *parts[0], *parts[1], *self._mark(family.middle)]

    async def _shown(self, read: Read, files: Seq[tuple[str, str]]) -> list[int]:
        """Further files as llama-server shows them: a repository, or snippets without their names."""
        family, found = self.family, list[int]()
        if mark := self._mark(family.repository):
            found += [*mark, *await read("myproject\n", False)]
        mark = self._mark(family.file)
        for name, text in files:
            head = f"{name}\n" if mark else "\n\n--- snippet ---\n\n"
            found += [*mark, *await read(head + text, False)]
        return [*found, *mark, *await read("filename\n", False)] if mark else found

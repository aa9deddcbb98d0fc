"""The tokenizer and the chat template of a GGUF file, with the interface of transformers' tokenizers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import BatchEncoding
from transformers.utils.chat_template_utils import render_jinja_template

from outpace.core import OutpaceError
from outpace.targets.llamacpp.library import LlamaModel, library

_NO_VOCABULARY = 0  # a file of weights alone
_NO_TOKEN = -1
# What transformers' tokenizers pad or cut by; a template would take it for a variable.
_SIZING = frozenset(("padding", "truncation", "max_length"))


class LlamaTokenizer:
    """The part of a tokenizer's interface used here: encoding, decoding, vocabulary, special tokens, chats.

    llama.cpp tokenises, so the tokens are the same as in llama.cpp. As in transformers, special tokens
    written out in a text are recognised.

    Attributes:
        has_text: the file has a vocabulary; without one the model is used with token ids only.
        end_tokens: tokens that end a text, a turn or a message.
        chat_template: a Jinja template; None if the file has none.
    """

    def __init__(self, model: LlamaModel) -> None:
        lib = library()
        self._model = model
        self._size = int(lib.llama_vocab_n_tokens(self.vocabulary))
        self.has_text = int(lib.llama_vocab_type(self.vocabulary)) != _NO_VOCABULARY
        every = range(self._size) if self.has_text else ()
        self.end_tokens = frozenset(
            token for token in every if lib.llama_vocab_is_eog(self.vocabulary, token)
        )
        template = lib.llama_model_chat_template(model.pointer, None)
        self.chat_template = None if template is None else template.decode(errors="replace")

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process the vocabulary is read from the file again."""
        return _of_file, (self._model.path,), {"chat_template": self.chat_template}

    @property
    def vocabulary(self) -> Any:
        """Pointer to llama.cpp's vocabulary."""
        return self._model.vocabulary

    def __len__(self) -> int:
        return self._size

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> BatchEncoding:
        """Ids of a text, or of each of several, as ``input_ids``, with an ``attention_mask`` of ones.

        Args:
            add_special_tokens: add the tokens that begin and end a text according to the file.
            return_tensors: "pt" or "np" for arrays [texts, tokens], of texts with as many tokens each.

        Raises:
            OutpaceError: the file has no vocabulary, or the texts differ in length and cannot be an array.
        """
        self.need_text()
        if isinstance(text, str):
            return _batch(self._encoded(text, add_special_tokens), return_tensors)
        return _batch([self._encoded(piece, add_special_tokens) for piece in text], return_tensors)

    def encode(
        self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> list[int] | Any:
        """Ids of a text; the arguments are those of a call."""
        return self(text, add_special_tokens, return_tensors)["input_ids"]

    def need_text(self) -> None:
        """Refuse a file without a vocabulary.

        Raises:
            OutpaceError: it has none.
        """
        if not self.has_text:
            raise OutpaceError(
                f"{self._model.path} has no tokenizer: it takes token ids alone; use a file with one"
            )

    def _encoded(self, text: str, special: bool) -> list[int]:
        lib, data = library(), text.encode()
        room = len(data) + 2
        tokens = (ctypes.c_int32 * room)()
        count = lib.llama_tokenize(self.vocabulary, data, len(data), tokens, room, special, True)
        if count < 0:  # more tokens than bytes
            tokens = (ctypes.c_int32 * -count)()
            count = lib.llama_tokenize(self.vocabulary, data, len(data), tokens, -count, special, True)
        return list(tokens[:count])

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens; an incomplete character becomes U+FFFD."""
        self.need_text()
        lib = library()
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        room = 8 * len(ids) + 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            asked = (tokens, len(ids), buffer, room, False, not skip_special_tokens)
            count = lib.llama_detokenize(self.vocabulary, *asked)
            if count >= 0:
                return buffer.raw[:count].decode(errors="replace")
            room = -count

    def batch_decode(self, texts: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """The texts of several lists of tokens."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in texts]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The tokens' spellings in the file."""
        lib = library()
        return [lib.llama_vocab_get_text(self.vocabulary, token).decode(errors="replace") for token in ids]

    @cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        self.need_text()
        return {
            token: token_id for token_id, token in enumerate(self.convert_ids_to_tokens(range(self._size)))
        }

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return dict(self._vocabulary)

    @cached_property
    def all_special_ids(self) -> list[int]:
        """Ids of control tokens."""
        lib = library()
        every = range(self._size) if self.has_text else ()
        return [token for token in every if lib.llama_vocab_is_control(self.vocabulary, token)]

    @property
    def all_special_tokens(self) -> list[str]:
        """Spellings of the control tokens in the file."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text; None if there is none."""
        return self._one(library().llama_vocab_bos(self.vocabulary))

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None if there is none."""
        return self._one(library().llama_vocab_eos(self.vocabulary))

    @staticmethod
    def _one(token: int) -> int | None:
        return None if token == _NO_TOKEN else int(token)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        return_tensors: str | None = None,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """A conversation in the file's chat template, as a call returns it, or as text without ``tokenize``.

        Args:
            return_dict: False returns the ids alone.
            options: variables of the template, such as add_generation_prompt.

        Raises:
            OutpaceError: the file has no chat template, or an option asks to pad or cut.
        """
        if self.chat_template is None:
            raise OutpaceError(f"{self._model.path} has no chat template")
        if unknown := sorted(_SIZING & options.keys()):
            raise OutpaceError(f"the tokenizer of a GGUF file takes no {unknown[0]}: leave it out")
        names = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
        known = {
            name: self.convert_ids_to_tokens([token])[0] for name, token in names.items() if token is not None
        }
        rendered: Any = render_jinja_template(
            [[dict(message) for message in conversation]],
            chat_template=self.chat_template,
            **{**known, **options},
        )
        text: str = rendered[0][0]
        if not tokenize:
            return text
        found = self(text, False, return_tensors)
        return found if return_dict else found["input_ids"]


def _batch(ids: list[Any], tensors: str | None) -> BatchEncoding:
    """The ids of a text, or of several, with their mask; as arrays they have a row for each text."""
    one = not ids or not isinstance(ids[0], list)
    rows = [ids] if one else ids
    if tensors is not None and len({len(row) for row in rows}) > 1:
        raise OutpaceError(
            "texts of different lengths are no array: call a GGUF file's tokenizer on each; it does not pad"
        )
    mask = [[1] * len(row) for row in rows]
    found = {"input_ids": ids, "attention_mask": mask[0] if one else mask}
    return BatchEncoding(found, tensor_type=tensors, prepend_batch_axis=one)


def _of_file(path: Path) -> LlamaTokenizer:
    return LlamaTokenizer(LlamaModel(path, 0, weights=False))

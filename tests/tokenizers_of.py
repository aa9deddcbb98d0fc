"""Small tokenizers, trained on the spot."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

STORY = (
    "The miller walked down to the river and looked at the wheel. The wheel had stopped, and the water ran "
    "by. So the miller's daughter went up the hill, took a long pole from the shed, and walked down again "
    "to the river. Together they pushed, and the wheel began to turn. \u201cWell,\u201d said the miller, "
    "\u201cthat was na\u00efve of me \u2013 I looked, and you took a pole!\u201d Then both walked home.\n"
)
EOS = "<|end|>"


@lru_cache
def byte_level(size: int, special: tuple[str, ...] = (EOS,)) -> PreTrainedTokenizerFast:
    """Byte-level BPE with so many tokens, merges learnt from the story."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([STORY], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])


@lru_cache
def sentencepiece_like(size: int) -> PreTrainedTokenizerFast:
    """BPE over characters, spaces written as sentencepiece does; it has no token for some of the story's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS, "<unk>"], show_progress=False)
    tokenizer.train_from_iterator([STORY.replace("\u2013", "-")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token="<unk>")

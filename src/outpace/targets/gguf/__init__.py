"""Models in GGUF files, by outpace's own functions."""

from outpace.targets.gguf.file import GgufFile, tokenizer_of

__all__ = ["GgufFile", "tokenizer_of"]

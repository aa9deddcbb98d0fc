"""Models in GGUF files, by outpace's own functions."""

from outpace.targets.gguf.file import GgufFile
from outpace.targets.gguf.tokenizer import tokenizer_of

__all__ = ["GgufFile", "tokenizer_of"]

"""Models in GGUF files, by outpace's own functions."""

from outpace.targets.gguf.file import GgufFile, tokenizer_of
from outpace.targets.gguf.updates import merge

__all__ = ["GgufFile", "merge", "tokenizer_of"]

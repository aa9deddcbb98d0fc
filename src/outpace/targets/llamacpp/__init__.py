"""Models in GGUF files, which llama.cpp runs."""

from outpace.targets.llamacpp.options import LlamaCppOptions
from outpace.targets.llamacpp.target import LlamaCppTarget

__all__ = ["LlamaCppOptions", "LlamaCppTarget"]

"""Models in GGUF files, which llama.cpp runs."""

from outpace.targets.llamacpp.target import LlamaCppOptions, LlamaCppTarget

__all__ = ["LlamaCppOptions", "LlamaCppTarget"]

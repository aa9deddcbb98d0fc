"""outpace's drafters in SGLang, as the speculative algorithm ``OUTPACE``."""

from outpace_sglang.plugin import register

__all__ = ["register"]

"""outpace's drafters in vLLM, as a proposer of ``method="custom_class"``."""

from outpace_vllm.proposer import Proposer

__all__ = ["Proposer"]

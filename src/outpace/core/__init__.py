"""Shared types: errors, parameters of a request, options of a target, drafts, verdicts, counts, results.

Imports nothing else from outpace, so that every module may import it.
"""

from outpace.core.collection import uncollected
from outpace.core.drafts import Draft, PromptStates, Source, Verdict
from outpace.core.errors import (
    ContextOverflow,
    NoTokenLeft,
    OutpaceError,
    RanksLost,
    UnsupportedModel,
    check_known,
    described,
    first_line,
    in_progress,
    load_extra,
    near,
    out_of_memory,
)
from outpace.core.extras import EXTRAS, missing, need
from outpace.core.options import DEFAULT_DRAFTER, DTYPES, USUAL, TargetOptions, dtype_name
from outpace.core.parameters import LogitsProcessor, SamplingParams, Speculation
from outpace.core.remedies import install
from outpace.core.results import (
    PROMISES,
    FinishReason,
    Generation,
    Promise,
    Stats,
    StopKind,
    StoppedBy,
    StreamedToken,
    TokenLogprobs,
)
from outpace.core.structured import StructuredOutputs

__all__ = [
    "DEFAULT_DRAFTER", "DTYPES", "EXTRAS", "PROMISES", "USUAL", "ContextOverflow", "Draft", "FinishReason",
    "Generation", "LogitsProcessor", "NoTokenLeft", "OutpaceError", "Promise", "PromptStates", "RanksLost",
    "SamplingParams", "Source", "Speculation", "Stats", "StopKind", "StoppedBy", "StreamedToken",
    "StructuredOutputs", "TargetOptions", "TokenLogprobs", "UnsupportedModel", "Verdict", "check_known",
    "described", "dtype_name", "first_line", "in_progress", "install", "load_extra", "missing", "near",
    "need", "out_of_memory", "uncollected",
]  # fmt: skip

"""outpace's engine with a drafter, as a method of the benchmark."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import zip_longest

from outpace.bench.runs import BASELINE, Method, MethodRun, PromptBatch
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.parts import Adaptive
from outpace.policy.governor import Governor
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel


class Ours(Method):
    """A drafter and a verifier in an outpace engine.

    Args:
        adaptive: as for ``Engine``.
        beyond: further tokens that the engine leaves room for after an answer, so that drafts up to this
            depth are not cut near its end. They are neither decoded nor counted.

    Raises:
        OutpaceError: unknown drafter or verifier, or parts that do not fit together.
    """

    peer = False

    def __init__(
        self,
        target: TargetModel,
        spec: str,
        verifier: str = "match",
        adaptive: Adaptive = "auto",
        temperature: float = 0.0,
        beyond: int = 0,
    ) -> None:
        self._beyond = beyond
        if spec == BASELINE:
            verifier = "match"  # without drafts there is nothing to verify
        self._target = target
        self._engine = Engine(target, spec, verifier, adaptive=adaptive)
        chosen = self._engine.verifier
        self.verifier = str(chosen)
        self.lossy = chosen.lossy
        kept = chosen.keeps_tokens(greedy=temperature == 0)
        super().__init__(spec, kept and target.promise != "not exact")
        # If a seed's tokens would depend on the clock, the engine refuses a seed.
        governor = self._engine.governor
        self.adaptive = governor is not None
        self._seeded = governor is None or not governor.timed or chosen.invariant

    def begin(self, anew: bool = False) -> None:
        """Make a new engine without memory of outputs; for a new suite its governor keeps only costs."""
        before = self._engine
        governor = before.governor
        if anew and isinstance(governor, Governor):
            governor = governor.again()
        self._engine = Engine(self._target, before.drafter, before.verifier, adaptive=governor or False)

    def run(self, request: PromptBatch) -> MethodRun:
        engine = self._engine
        reads = engine.drafter.reads_references
        sequences: list[Sequence] = []
        first: MethodRun | None = None
        arrived: dict[Sequence, list[float]] = {}
        forwards = 0
        began = time.perf_counter()
        try:
            for prompt, texts, seed in zip(request.prompts, request.references, request.seeds, strict=True):
                params = SamplingParams(
                    max_new_tokens=request.max_new_tokens + self._beyond,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    seed=seed if self._seeded else None,
                    ignore_eos=not request.ends,
                )
                own, source = engine.target.parts(prompt)
                copied = texts if reads else ()
                sequences.append(engine.add(own, params, references=copied, source=source))
            while any(sequence.finish_reason is None for sequence in sequences):
                took_part = engine.step()
                for sequence in took_part:
                    sequence.check()
                    if self._beyond and len(sequence.output) >= request.max_new_tokens:
                        engine.remove(sequence)
                now = time.perf_counter() - began
                for sequence in took_part:
                    times = arrived.setdefault(sequence, [])
                    times += [now] * (len(sequence.output) - len(times))
                # A long prompt is read by several forwards; together they are the first step.
                if first is not None:
                    forwards += 1
                elif all(sequence.output or sequence.finish_reason for sequence in sequences):
                    forwards = 1
                    first = _run(sequences, request, now, forwards)
            seconds = time.perf_counter() - began
        finally:
            for sequence in sequences:
                engine.remove(sequence)
        found = _run(sequences, request, seconds, forwards, first)
        each = [arrived[sequence][: request.max_new_tokens] for sequence in sequences]
        return replace(found, last_seconds=[times[-1] for times in each], token_seconds=each)


def _run(
    sequences: list[Sequence],
    request: PromptBatch,
    seconds: float,
    forwards: int,
    first: MethodRun | None = None,
) -> MethodRun:
    """Summarise a run so far from the counts of its sequences.

    All sequences joined at once, and a step's seconds count in full for each sequence in it, so the maximum
    over the sequences is the total.
    """
    stats = [sequence.stats for sequence in sequences]
    depths = [one.accepted_per_position for one in stats]
    drafting = max(one.seconds_draft for one in stats)
    verifying = max(one.seconds_verify for one in stats)
    if first is not None:
        drafting -= first.draft_seconds or 0.0
        verifying -= first.verify_seconds or 0.0
    outputs = [list(sequence.output[: request.max_new_tokens]) for sequence in sequences]
    return MethodRun(
        outputs=outputs,
        seconds=seconds,
        first_seconds=seconds if first is None else first.seconds,
        first_tokens=sum(map(len, outputs)) if first is None else first.tokens,
        forwards=forwards,
        steps=sum(one.steps for one in stats),
        drafted=sum(one.drafted for one in stats),
        accepted=sum(one.accepted for one in stats),
        accepted_at=[sum(column) for column in zip_longest(*depths, fillvalue=0)],
        draft_seconds=drafting,
        verify_seconds=verifying,
    )

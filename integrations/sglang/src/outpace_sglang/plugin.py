"""The speculative algorithm ``OUTPACE``: SGLang's NGRAM, with outpace's drafts in place of its corpus.

SGLang asks an algorithm what it is in dozens of places, and has a tree verified only if the answer is NGRAM.
So this one answers as NGRAM does, but for its worker; SGLang's own base class for algorithms lacks some of
the questions (0.5.23: ``carries_draft_hidden_states``).
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.core import OutpaceError
from outpace_sglang.drafts import Drafts, HostedModel, hosted_drafter

NAME, VARIABLE = "OUTPACE", "OUTPACE_DRAFTER"
_NODES = 12  # of SGLang, if --speculative-num-draft-tokens is not given
_OWN = {"create_worker", "handle_server_args", "get_platform_worker_cls"}


def register() -> None:
    """Register the algorithm; SGLang calls this entry point of ``sglang.srt.plugins`` in each process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import spec_info, spec_registry

    algorithm = algorithm_class(spec_info.SpeculativeAlgorithm, spec_registry.CustomSpecAlgo)
    spec_info.SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=algorithm)(_worker)
    verify = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
    HookRegistry.register(verify, check_request, HookType.BEFORE)


def algorithm_class(builtin: Any, base: Any) -> Any:
    """The class of the algorithm.

    Args:
        builtin: SGLang's enumeration of its own algorithms.
        base: its base class of other algorithms.
    """

    class Algorithm(base):  # type: ignore[misc]  # SGLang has no types here
        def handle_server_args(self, server_args: Any) -> None:
            from sglang.srt.arg_groups.speculative_hook import _handle_ngram

            hosted_drafter(spec(), server_args.speculative_num_draft_tokens or _NODES)
            if server_args.enable_custom_logit_processor:
                raise OutpaceError(
                    "SGLang calls no custom logit processors on drafts: leave out "
                    f"--enable-custom-logit-processor, or start SGLang without {NAME}"
                )
            if server_args.speculative_ngram_external_corpus_path is not None:
                raise OutpaceError(
                    f"{NAME} reads no corpus of SGLang's: leave out --speculative-ngram-external-corpus-path"
                )
            _handle_ngram(server_args)

    for name, member in vars(builtin).items():
        if inspect.isfunction(member) and not name.startswith("_") and name not in _OWN:
            setattr(Algorithm, name, getattr(builtin.NGRAM, name))
    return Algorithm


def spec() -> str:
    """The spec string of the drafter.

    Raises:
        OutpaceError: none is given.
    """
    found = os.environ.get(VARIABLE, "")
    if not found:
        raise OutpaceError(f"name a drafter in the environment, as in {VARIABLE}=suffix")
    return found


def check_request(params: Any, *_: Any) -> None:
    """Refuse a request that SGLang would not decode exactly while anything drafts.

    Args:
        params: its ``SamplingParams``.

    Raises:
        ValueError: SGLang answers with its message.
    """
    from sglang.srt.runtime_context import get_device, get_spec

    if (get_spec().speculative_algorithm or "").upper() == NAME:
        refuse_inexact(params, get_device().device)


def refuse_inexact(params: Any, device: str) -> None:
    """Refuse parameters that SGLang's verification does not apply as its plain decoding does.

    Raises:
        OutpaceError: one of them is given; the message gives the reason.
    """
    reasons = {
        "frequency_penalty": "ignores the drafted tokens before a place",
        "presence_penalty": "ignores the drafted tokens before a place",
        "repetition_penalty": "ignores the drafted tokens before a place",
        "min_new_tokens": "ignores the drafted tokens before a place",
        "min_p": "is not applied to drafts",
    }
    for name, reason in reasons.items():
        if getattr(params, name) != (1.0 if name == "repetition_penalty" else 0):
            raise OutpaceError(f"{name} {reason} in SGLang; leave it out, or start SGLang without {NAME}")
    if not device.startswith("cuda") and params.top_k != 1:
        raise OutpaceError(
            f"SGLang verifies drafts on {device} greedily; set temperature to 0, or start it without {NAME}"
        )


def _worker(server_args: Any) -> Any:
    """The class of the worker; SGLang makes one in each scheduler."""
    from sglang.srt.speculative import ngram_worker

    return worker_class(ngram_worker)


def worker_class(module: Any) -> Any:
    """SGLang's worker for NGRAM, with other drafts.

    Args:
        module: SGLang's ``ngram_worker``.
    """

    class Worker(module.NGRAMWorker):  # type: ignore[misc]  # SGLang has no types here
        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            def corpus(**options: Any) -> Drafts:
                nodes, runner = options["draft_token_num"], target_worker.model_runner
                model = HostedModel(runner.model_config, str(runner.device))
                return Drafts(hosted_drafter(spec(), nodes), model, nodes)

            own = module.NgramCorpus  # compiled when it is made, and not needed
            module.NgramCorpus = corpus
            try:
                super().__init__(server_args, gpu_id, nccl_port, target_worker)
            finally:
                module.NgramCorpus = own
            self._latest: tuple[list[str], Any, Any, Any] | None = None

        def forward_batch_generation(self, batch: Any, *args: Any, **options: Any) -> Any:
            names = [req.rid for req in batch.reqs]
            verifies = batch.forward_mode.is_decode()
            result = super().forward_batch_generation(batch, *args, **options)
            if verifies:
                logits = result.logits_output.next_token_logits
                best = logits.topk(self.ngram_corpus.columns).indices
                self._latest = names, result.next_token_ids, result.accept_lens, best
            return result

        def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
            self._learn()
            outputs = [list(req.output_ids) for req in batch.reqs]
            if self.enable_overlap and not batch.grammar_needs_sync():
                # SGLang has not yet added the tokens of the last step to the requests.
                info = batch.spec_info
                outputs = [
                    [*output, *new]
                    for output, new in zip(
                        outputs, self._rows(info.accept_tokens, info.accept_lens), strict=True
                    )
                ]
            prompts = [list(req.origin_input_ids_unpadded) for req in batch.reqs]
            drafts: Drafts = self.ngram_corpus
            return drafts.get([req.rid for req in batch.reqs], prompts, outputs)

        def _learn(self) -> None:
            """Tell the drafter the last step, now that its tokens are needed in any case."""
            if self._latest is not None:
                names, tokens, lengths, best = self._latest
                self._latest = None
                rows = best.reshape(len(names), self.draft_token_num, -1).cpu().numpy()
                self.ngram_corpus.learn(names, self._rows(tokens, lengths), rows)

        def _rows(self, tokens: Any, lengths: Any) -> list[list[int]]:
            """The emitted tokens of each request, of a step's tokens, [rows * nodes]."""
            found = tokens.reshape(-1, self.draft_token_num).tolist()
            return [row[:length] for row, length in zip(found, lengths.tolist(), strict=True)]

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Do nothing: ``_learn`` tells the drafter."""

    return Worker

"""The proposer that vLLM makes, and how outpace's drafters are told what vLLM decoded.

vLLM verifies one chain per request, and passes a proposer token ids alone: neither logits nor request ids. A
request's state is therefore found by its text: each row's tokens before those of the step are the tokens that
the row had after the step before, wherever in the batch it was then.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters import Drafter, load_drafter
from outpace.drafters.copying.reference import Reference
from outpace.draws.logits import Logits
from outpace.draws.noise import Key
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.targets.weights.pretrained import load_tokenizer
from outpace.tree import chain

HOSTED = ("prompt_lookup", "suffix", "reference", "retrieval")
_KEY = "outpace"  # in vLLM's additional_config


class HostedModel(TargetModel):
    """The target as far as the hosted drafters ask about it; vLLM itself runs the model.

    Args:
        config: vLLM's ``ModelConfig``.
    """

    def __init__(self, config: Any) -> None:
        self.vocabulary = config.get_vocab_size()
        self.context = config.max_model_len
        ends = getattr(config.hf_text_config, "eos_token_id", None)
        self.eos_token_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        self.tokenizer = load_tokenizer(None, config.tokenizer, needed=False)

    def new_cache(self, *args: Any, **options: Any) -> Any:
        raise OutpaceError("vLLM runs the model and keeps its cache; use outpace.Engine to decode here")

    def forward(self, *args: Any, **options: Any) -> Any:
        raise OutpaceError("vLLM runs the model and keeps its cache; use outpace.Engine to decode here")


@dataclass(eq=False)
class Request:
    """A request of vLLM's: its text, the drafter's state, and the latest draft."""

    sequence: Sequence
    state: Any
    draft: Draft = dataclasses.field(default_factory=Draft)


class Proposer:
    """A proposer of vLLM's method ``custom_class``, in which it is named ``outpace_vllm.Proposer``.

    The drafter is named by its spec string in ``additional_config``, as in ``{"outpace": "suffix"}``.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        OutpaceError: no drafter is named, or one that cannot draft here; the message gives the reason.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.drafter = hosted_drafter(vllm_config.additional_config)
        self.most: int = vllm_config.speculative_config.num_speculative_tokens
        self._length: int = vllm_config.model_config.max_model_len
        self._model = HostedModel(vllm_config.model_config)
        self._shared = self.drafter.prepare(self._model)
        # By text, as the bytes of its token ids. Requests with equal texts have equal states: any will do.
        self._requests: dict[bytes, list[Request]] = {}

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load nothing: vLLM calls this for every proposer, and none of these has a model."""

    def propose(
        self,
        sampled_token_ids: Seq[Seq[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for each row of vLLM's batch; vLLM calls this after each step.

        Args:
            sampled_token_ids: for each row, the tokens that the step emitted; none while its prompt is read.
            num_tokens_no_spec: for each row, the number of its tokens, those of the step included.
            token_ids_cpu: the rows' tokens, [rows, context].
            slot_mappings: not used.

        Returns:
            for each row a chain of at most ``num_speculative_tokens`` tokens, possibly empty.
        """
        del slot_mappings
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(sampled_token_ids))]
        requests = self._match(texts, sampled_token_ids)
        return [
            self._draft(request) if request is not None and new else []
            for request, new in zip(requests, sampled_token_ids, strict=True)
        ]

    def _match(self, texts: Seq[NDArray[np.int32]], news: Seq[Seq[int]]) -> list[Request | None]:
        """The request of each row, told of the row's new tokens; requests without a row have ended.

        A row whose prompt is still read may have the text of one that is being decoded, so rows with new
        tokens come first.
        """
        known, self._requests = self._requests, {}
        found: list[Request | None] = [None] * len(texts)
        for row in sorted(range(len(texts)), key=lambda row: not news[row]):
            text, new = texts[row], news[row]
            same = known.get(text[: len(text) - len(new)].tobytes())
            request = same.pop() if same else None
            if request is not None:
                self._learn(request, new)
            elif new:
                request = self._start(text, len(text) - len(new))
            if request is not None:
                self._requests.setdefault(text.tobytes(), []).append(request)
            found[row] = request
        for same in known.values():
            for request in same:
                self.drafter.stop(request.state)
        return found

    def _start(self, text: NDArray[np.int32], prompt: int) -> Request:
        """A new request, whose prompt is the first ``prompt`` tokens of the text."""
        tokens = text.tolist()
        limit, ends = self._length - prompt, self._model.eos_token_ids
        sequence = Sequence(tokens[:prompt], SamplingParams(), Key(0), limit, ends, output=tokens[prompt:])
        return Request(sequence, self.drafter.start(sequence, self._shared))

    def _learn(self, request: Request, new: Seq[int]) -> None:
        """Tell the drafter the outcome of a step. vLLM may have verified less than what was drafted."""
        sequence, draft = request.sequence, request.draft
        request.draft = Draft()
        if not new:
            return
        root = sequence.output_length
        for token in new:
            sequence.append(token)
        pairs = zip(draft.tokens, new[:-1], strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        no_logits = Logits(torch.empty(0, self._model.vocabulary))  # no hosted drafter reads them
        step = Step(
            draft, range(len(draft)), list(range(accepted)), list(new), no_logits, root, sequence, hidden={}
        )
        self.drafter.observe([request.state], [step])

    def _draft(self, request: Request) -> list[int]:
        """A chain for a request, within what it may still emit."""
        sequence = request.sequence
        sequence.budget = self.most
        most = sequence.within_reach(self.most)
        if most <= 0:
            return []
        (draft,) = self.drafter.propose([request.state])
        tokens = best_path(draft)[:most]
        request.draft = chain(tokens)
        return tokens


def best_path(draft: Draft) -> list[int]:
    """The path of a tree from the root by each node's first child, the likeliest."""
    tokens: list[int] = []
    last = -1
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == last:
            tokens.append(token)
            last = node
    return tokens


def hosted_drafter(config: Any) -> Drafter[Any]:
    """The drafter named in vLLM's ``additional_config``, which drafts chains where it has the choice.

    Raises:
        OutpaceError: there is none, or it cannot draft in vLLM.
    """
    spec = config.get(_KEY) if isinstance(config, Mapping) else None
    names = ", ".join(HOSTED)
    if not isinstance(spec, str):
        raise OutpaceError(
            f'name a drafter in additional_config={{"{_KEY}": "suffix"}}; vLLM can host: {names}'
        )
    drafter = load_drafter(spec)
    if drafter.name not in HOSTED:
        raise OutpaceError(f"{drafter.name} cannot draft in vLLM: {_reason(drafter)}; use one of: {names}")
    if isinstance(drafter, Reference) and not drafter.prompt:
        raise OutpaceError("reference: requests of vLLM have no references; leave prompt at true")
    if drafter.name == "retrieval":
        return drafter
    if re.search(r"\bbranches\s*=", spec):
        raise OutpaceError(f"{drafter.name}: vLLM verifies chains, not trees; leave out branches")
    return cast("Drafter[Any]", dataclasses.replace(cast(Any, drafter), branches=1))


def _reason(drafter: Drafter[Any]) -> str:
    if drafter.reads_top:
        return (
            "it reads the target's most probable tokens after each node, and vLLM passes its proposers "
            "token ids alone"
        )
    return "it needs the target's logits, hidden states or trees, or another model"

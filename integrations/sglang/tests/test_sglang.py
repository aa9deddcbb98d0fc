"""The algorithm in a small imitation of SGLang's worker: trees of a fixed size, results that arrive late."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outpace.core import Draft, OutpaceError
from outpace.drafters.copying.suffix import Suffix
from outpace_sglang.drafts import Drafts, HostedModel, accepted, hosted_drafter
from outpace_sglang.plugin import algorithm_class, check_request, refuse_inexact, register, worker_class

VOCABULARY, CONTEXT, NODES = 50, 200, 16
CONFIG = SimpleNamespace(vocab_size=VOCABULARY, context_len=CONTEXT, hf_eos_token_id=None)
SPECS = [
    "lookahead:window=2,ngram=3,guesses=4",
    "suffix",
    "token_recycling",
    "prompt_lookup",
    "combined:(suffix)+(token_recycling)",
]


def says(text: Sequence[int]) -> int:
    """The model: its next token depends on the last two and, now and then, on the length of the text."""
    return (7 * text[-1] + 3 * text[-2] + (len(text) % 11 == 0)) % 13


def decoded(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + count:
        text.append(says(text))
    return text[len(prompt) :]


def prompts(seed: int, count: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(13) for _ in range(rng.randrange(3, 40))] for _ in range(count)]


@dataclass
class Req:
    rid: str
    origin_input_ids_unpadded: list[int]
    end: int
    output_ids: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)  # emitted, and not yet in output_ids

    @property
    def text(self) -> list[int]:
        return [*self.origin_input_ids_unpadded, *self.output_ids, *self.late]


def corpus(**options: Any) -> Any:
    raise AssertionError("SGLang's corpus was made")


class NGRAMWorker:
    """SGLang's worker around the methods that are replaced."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.enable_overlap = server_args.overlap
        self.draft_token_num = NODES
        self.ngram_corpus = MODULE.NgramCorpus(draft_token_num=NODES, capacity=5)
        self.accepted, self.before = 0, set[str]()

    def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Any:
        tokens, masks = self._prepare_draft_tokens(batch)
        count = len(batch.reqs)
        assert tokens.shape == (count * NODES,) and masks.shape == (count * NODES * NODES,)
        logits = torch.zeros(count * NODES, VOCABULARY)
        emitted = np.zeros((count, NODES), np.int32)
        lengths = np.zeros(count, np.int32)
        trees = zip(tokens.reshape(count, NODES), masks.reshape(count, NODES, NODES), strict=True)
        for row, (req, (tree, mask)) in enumerate(zip(batch.reqs, trees, strict=True)):
            assert tree[0] == req.text[-1]
            above = np.tril(mask, -1)
            parents = [int(np.flatnonzero(line)[-1]) if line.any() else -1 for line in above]
            for node in range(NODES):
                path = [int(tree[one]) for one in np.flatnonzero(mask[node]) if one]
                best = says([*req.text, *path])
                logits[row * NODES + node] = torch.arange(VOCABULARY) * 1e-3
                logits[row * NODES + node, best] = 1
            new, node = [says(req.text)], 0
            while True:
                right = [k for k in range(1, NODES) if parents[k] == node and tree[k] == new[-1]]
                if not right:
                    break
                (node,) = right
                new.append(says([*req.text, *new]))
            self.accepted += len(new) - 1
            emitted[row, : len(new)], lengths[row] = new, len(new)
        self._update_ngram_corpus(batch)
        names = {req.rid for req in batch.reqs}
        self.ngram_corpus.erase_match_state(list(self.before - names))
        self.before = names
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits),
            next_token_ids=torch.from_numpy(emitted.reshape(-1)),
            accept_lens=torch.from_numpy(lengths),
        )


MODULE = SimpleNamespace(NGRAMWorker=NGRAMWorker, NgramCorpus=corpus)


def worker(overlap: bool = False) -> Any:
    runner = SimpleNamespace(model_config=CONFIG, device="cpu")
    made = worker_class(MODULE)(SimpleNamespace(overlap=overlap), 0, 0, SimpleNamespace(model_runner=runner))
    assert MODULE.NgramCorpus is corpus
    return made


def serve(made: Any, texts: list[list[int]], count: int = 50, rows: int = 3) -> dict[str, list[int]]:
    """SGLang's scheduler: requests join with their first token, rows move, results arrive late."""
    rng = random.Random(1)
    waiting = [Req(f"r{number}", text, count) for number, text in enumerate(texts)]
    batch: list[Req] = []
    done = {}
    while waiting or batch:
        while waiting and len(batch) < rows:
            req = waiting.pop(0)
            (req.late if made.enable_overlap else req.output_ids).append(says(req.text))
            batch.append(req)
        rng.shuffle(batch)
        late = np.zeros((len(batch), NODES), np.int32)
        for row, req in enumerate(batch):
            late[row, : len(req.late)] = req.late
        lengths = torch.tensor([len(req.late) for req in batch])
        info = SimpleNamespace(accept_tokens=torch.from_numpy(late.reshape(-1)), accept_lens=lengths)
        mode = SimpleNamespace(is_decode=lambda: True)
        step = SimpleNamespace(
            reqs=list(batch), spec_info=info, forward_mode=mode, grammar_needs_sync=lambda: False
        )
        result = made.forward_batch_generation(step, on_publish=None)
        for row, req in enumerate(batch):
            new = result.next_token_ids.reshape(-1, NODES)[row, : result.accept_lens[row]].tolist()
            req.output_ids += req.late
            req.late = new
            if not made.enable_overlap:
                req.output_ids, req.late = [*req.output_ids, *new], []
        for req in batch:
            if len(req.output_ids) + len(req.late) >= req.end:
                done[req.rid] = [*req.output_ids, *req.late][: req.end]
        batch = [req for req in batch if req.rid not in done]
    return done


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_it_drafts_what_is_accepted_and_changes_no_token(
    spec: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_DRAFTER", spec)
    stopped: list[Any] = []
    plain = Drafts.erase_match_state
    monkeypatch.setattr(
        Drafts, "erase_match_state", lambda self, names: (stopped.extend(names), plain(self, names))
    )
    made, texts = worker(overlap), prompts(3)
    found = serve(made, texts)
    assert found == {f"r{number}": decoded(text, 50) for number, text in enumerate(texts)}
    assert made.accepted > 15
    assert len(stopped) >= len(texts) - 3 and len(made.ngram_corpus._requests) <= 3
    made.ngram_corpus.reset()
    assert not made.ngram_corpus._requests


def drafts(spec: str, nodes: int = NODES) -> Drafts:
    return Drafts(hosted_drafter(spec, nodes), HostedModel(CONFIG, "cpu"), nodes)


def test_no_path_leads_to_the_nodes_that_fill_up() -> None:
    tokens, masks = drafts("suffix").get(["a"], [[1, 2, 3, 4]], [[1, 2]])
    mask = masks.reshape(NODES, NODES)
    assert tokens[:3].tolist() == [2, 3, 4]
    drafted = int(mask[:, 0].sum())
    assert 3 <= drafted < NODES
    assert (mask[drafted:] == np.eye(NODES, dtype=bool)[drafted:]).all()


@pytest.mark.parametrize("spec", SPECS)
def test_a_request_is_told_of_each_step_once(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose text is not what was learnt would start again in every step."""
    monkeypatch.setenv("OUTPACE_DRAFTER", spec)
    kind = type(hosted_drafter(spec, NODES))
    starts: list[int] = []
    plain = kind.start
    monkeypatch.setattr(kind, "start", lambda self, seq, shared: starts.append(1) or plain(self, seq, shared))  # type: ignore[func-returns-value]
    serve(worker(overlap=True), prompts(4))
    assert len(starts) == 7


def test_a_text_that_changed_by_other_means_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    plain = Suffix.start

    def start(self: Suffix, sequence: Any, shared: Any) -> Any:
        starts.append(len(sequence.tokens))
        return plain(self, sequence, shared)

    monkeypatch.setattr(Suffix, "start", start)
    made = drafts("suffix")
    for output in ([5], [5], [6], [6, 7]):
        made.get(["a"], [[1, 2, 3]], [output])
    assert starts == [4, 4, 5]


def test_the_path_of_what_was_emitted() -> None:
    draft = Draft([1, 2, 1, 3, 4], [-1, -1, 1, 2, 2])
    assert accepted(draft, [2, 1, 4, 9]) == [1, 2, 4]
    assert accepted(draft, [2]) == [] == accepted(Draft(), [5])


@pytest.mark.parametrize(
    ("spec", "nodes", "message"),
    [
        ("sufix", 16, "Did you mean 'suffix'"),
        ("draft_model", 16, "draft_model cannot draft in SGLang"),
        ("combined:(suffix)+(reference)", 16, "reference cannot draft in SGLang"),
        ("lookahead", 12, "lookahead needs 32 nodes.*or give it a smaller window"),
        ("suffix", 1, "suffix needs 2 nodes"),
    ],
)
def test_what_cannot_draft_is_refused(spec: str, nodes: int, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        hosted_drafter(spec, nodes)


PLAIN: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "top_k": 1,
}


@pytest.mark.parametrize(
    ("params", "device", "message"),
    [
        ({"repetition_penalty": 1.2}, "cuda", "repetition_penalty ignores the drafted tokens"),
        ({"frequency_penalty": -0.5}, "cuda", "frequency_penalty ignores"),
        ({"presence_penalty": 0.5}, "cuda", "presence_penalty ignores"),
        ({"min_new_tokens": 5}, "cuda", "min_new_tokens ignores"),
        ({"min_p": 0.1}, "cuda", "min_p is not applied"),
        ({"top_k": 40}, "cpu", "greedily; set temperature to 0"),
        ({"top_k": 40}, "cuda", None),
        ({}, "cpu", None),
    ],
)
def test_a_request_that_would_not_be_exact_is_refused(
    params: dict[str, Any], device: str, message: str | None
) -> None:
    given = SimpleNamespace(**PLAIN | params)
    if message is None:
        refuse_inexact(given, device)
        return
    with pytest.raises(OutpaceError, match=message):
        refuse_inexact(given, device)


class Builtin(Enum):
    """SGLang's algorithms, with a question that its base class of other algorithms lacks."""

    EAGLE = auto()
    NGRAM = auto()

    def is_ngram(self) -> bool:
        return self is Builtin.NGRAM

    def carries_draft_hidden_states(self) -> bool:
        return self is Builtin.EAGLE

    def handle_server_args(self, server_args: Any) -> None:
        raise AssertionError

    def create_worker(self, server_args: Any) -> Any:
        raise AssertionError


class Base:
    """SGLang's base class."""

    def __init__(self, name: str, factory: Any) -> None:
        self.name, self.factory = name, factory

    def is_ngram(self) -> bool:
        return False

    def create_worker(self, server_args: Any) -> Any:
        return self.factory(server_args)


def args(**given: Any) -> Any:
    usual = {
        "speculative_num_draft_tokens": NODES,
        "speculative_ngram_external_corpus_path": None,
        "enable_custom_logit_processor": False,
    }
    return SimpleNamespace(**usual | given)


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the calls of SGLang's own preparation for NGRAM."""
    calls: list[Any] = []
    fakes: dict[str, dict[str, Any]] = {
        "sglang.srt.arg_groups.speculative_hook": {"_handle_ngram": calls.append},
        "sglang.srt.runtime_context": {
            "get_spec": lambda: SimpleNamespace(speculative_algorithm=ALGORITHM),
            "get_device": lambda: SimpleNamespace(device="cpu"),
        },
        "sglang.srt.speculative.ngram_worker": vars(MODULE),
    }
    for name, contents in fakes.items():
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["sglang.srt.speculative"])["ngram_worker"] = MODULE
    return calls


ALGORITHM = "OUTPACE"


def test_the_algorithm_answers_as_ngram(handled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = algorithm_class(Builtin, Base)("OUTPACE", lambda server_args: "worker")
    assert made.name == "OUTPACE" and made.is_ngram() and not made.carries_draft_hidden_states()
    assert made.create_worker(None) == "worker"
    monkeypatch.delenv("OUTPACE_DRAFTER", raising=False)
    with pytest.raises(OutpaceError, match="OUTPACE_DRAFTER=suffix"):
        made.handle_server_args(args())
    monkeypatch.setenv("OUTPACE_DRAFTER", "lookahead")
    with pytest.raises(OutpaceError, match="needs 32 nodes, and SGLang verifies 12"):
        made.handle_server_args(args(speculative_num_draft_tokens=None))
    with pytest.raises(OutpaceError, match="leave out --speculative-ngram-external-corpus-path"):
        made.handle_server_args(
            args(speculative_num_draft_tokens=40, speculative_ngram_external_corpus_path="x")
        )
    with pytest.raises(OutpaceError, match="leave out --enable-custom-logit-processor"):
        made.handle_server_args(args(speculative_num_draft_tokens=40, enable_custom_logit_processor=True))
    assert not handled
    monkeypatch.setenv("OUTPACE_DRAFTER", "suffix")
    given = args()
    made.handle_server_args(given)
    assert handled == [given]


def test_the_entry_point_registers_it(handled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}

    def register_algorithm(name: str, supports_overlap: bool, spec_class: Any) -> Any:
        return lambda factory: registered.update({name: spec_class(name, factory)})

    hooks: list[tuple[Any, ...]] = []
    vars(sys.modules["sglang.srt.speculative"]).update(
        spec_info=SimpleNamespace(SpeculativeAlgorithm=Builtin),
        spec_registry=SimpleNamespace(CustomSpecAlgo=Base),
    )
    monkeypatch.setattr(Builtin, "register", register_algorithm, raising=False)
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    vars(registry).update(
        HookRegistry=SimpleNamespace(register=lambda *given: hooks.append(given)),
        HookType=SimpleNamespace(BEFORE="before"),
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", ModuleType("sglang.srt.plugins"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    register()
    assert issubclass(registered["OUTPACE"].create_worker(args()), NGRAMWorker)
    assert hooks == [("sglang.srt.sampling.sampling_params.SamplingParams.verify", check_request, "before")]
    inexact = SimpleNamespace(**PLAIN | {"min_p": 0.5})
    with pytest.raises(OutpaceError, match="min_p"):
        check_request(inexact, VOCABULARY)
    monkeypatch.setattr(sys.modules[__name__], "ALGORITHM", "NGRAM")
    check_request(inexact, VOCABULARY)

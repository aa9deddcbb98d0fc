"""Train outpace-nano and outpace-nano-draft, the package's models.

    python lab/tools/train_nano.py --data DATA --out src/outpace/models --minutes 90

Both models learn from the same batches in one process. The length of the training is given in minutes, and
the learning rate falls to zero over that time, so that the result is a finished model on any machine. An
interrupted run resumes from its last checkpoint when it is started again with the same --checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import queue
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from corpus import END_OF_TEXT, GSM8K_FILE, PROSE_FILE, Corpus, build_corpus
from muon import Muon

TARGET = "outpace-nano"
DRAFT = "outpace-nano-draft"

VOCABULARY = 4096
CONTEXT = 2048
END_ID = 0

PIECE = 1100
"""Approximate maximum of tokens per forward, so that the logits stay in the cache."""

ROWS = {0.0: 256, 0.5: 512, 0.94: CONTEXT}
"""Tokens per row, by the share of the training from which on it applies. Short rows are faster."""

WARM_UP = 0.02
MUON_RATE = 3e-3
ADAM_RATE = 3e-3
WEIGHT_DECAY = 0.1
CLIP = 1.0

PAUSE = 20.0
"""A step longer than this many seconds was paused from outside; the gap does not count."""

MIX = {
    "gsm8k": 0.28,
    "code": 0.18,
    "function": 0.14,
    "prose": 0.06,
    "dialogue": 0.03,
    "correction": 0.14,
    "retrieval": 0.17,
}
"""The share of the rows that each kind of document gets."""

SHAPES = {
    TARGET: {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    DRAFT: {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

Tokens = NDArray[np.uint16]


# --- Tokenizer ---------------------------------------------------------------------------------------------


def train_tokenizer(corpus: Corpus, seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with single digits, trained on a sample of each kind."""
    rng = random.Random(seed)
    sample = []
    for texts in corpus.train.values():
        # About three million characters of each kind are plenty for 4,096 tokens.
        average = sum(map(len, texts)) / len(texts)
        sample += rng.sample(texts, min(len(texts), round(3e6 / average)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A newline is a separate token, so that a prompt may end with one whatever the next line is.
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[Tokens]:
    """Each text as token ids, followed by the end-of-text token."""
    encoded = []
    for start in range(0, len(texts), 1000):
        for ids in tokenizer(texts[start : start + 1000], verbose=False)["input_ids"]:
            encoded.append(np.array([*ids, END_ID], dtype=np.uint16))
    return encoded


# --- Batches -----------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """An endless stream of the tokens of one kind. Each epoch has its own order of the documents."""

    documents: list[Tokens]
    seed: int
    epoch: int = 0
    position: int = 0
    _order: Tokens | None = field(default=None, repr=False)

    def take(self, count: int) -> Tokens:
        """The next tokens."""
        parts = []
        while count > 0:
            if self._order is None:
                shuffle = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.documents))
                self._order = np.concatenate([self.documents[index] for index in shuffle])
            part = self._order[self.position : self.position + count]
            parts.append(part)
            count -= len(part)
            self.position += len(part)
            if self.position == len(self._order):
                self.epoch, self.position, self._order = self.epoch + 1, 0, None
        return np.concatenate(parts)


@dataclass
class Batches:
    """Rows of packed documents, where the kind of each row is drawn from the mix."""

    streams: dict[str, Stream]
    rng: np.random.Generator

    @classmethod
    def of(cls, encoded: dict[str, list[Tokens]], seed: int) -> Batches:
        """A source of batches over the encoded documents of each kind."""
        streams = {kind: Stream(encoded[kind], seed=seed + index) for index, kind in enumerate(MIX)}
        return cls(streams, np.random.default_rng(seed))

    def next(self, tokens: int, length: int) -> torch.Tensor:
        """A batch of that many tokens in rows of that length, each with one more token as the last label."""
        count = tokens // length
        # Evenly spaced points with one random offset keep every batch as close to the mix as it can be.
        points = (self.rng.random() + np.arange(count)) / count
        indices = np.searchsorted(np.cumsum(list(MIX.values()))[:-1], points, side="right")
        rows = np.stack([self.streams[list(MIX)[index]].take(length + 1) for index in indices])
        return torch.from_numpy(rows.astype(np.int64))

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint needs to continue with the next batch."""
        places = {kind: [stream.epoch, stream.position] for kind, stream in self.streams.items()}
        return {"places": places, "rng": self.rng.bit_generator.state}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for kind, (epoch, position) in state["places"].items():
            self.streams[kind].epoch, self.streams[kind].position = epoch, position
        self.rng.bit_generator.state = state["rng"]


# --- Models and optimizers ---------------------------------------------------------------------------------


def new_model(name: str) -> LlamaForCausalLM:
    """A model with random weights in the shape of that name."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        head_dim=32,
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=None,
        rms_norm_eps=1e-6,
    )
    config.update(SHAPES[name])
    return LlamaForCausalLM(config)


def warm_model(name: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An earlier model, whose tokenizer may be different.

    Tokens of the old tokenizer keep their embeddings. A new token starts as the mean of the old tokens that
    spell it.
    """
    old_tokenizer = AutoTokenizer.from_pretrained(folder)
    model = new_model(name)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    old, vocabulary = weights["model.embed_tokens.weight"], old_tokenizer.get_vocab()
    rows = []
    for token in tokenizer.convert_ids_to_tokens(range(VOCABULARY)):
        text = tokenizer.convert_tokens_to_string([token])
        ids = [vocabulary[token]] if token in vocabulary else old_tokenizer(text)["input_ids"]
        rows.append(old[ids].mean(0))
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = torch.stack(rows)
    model.load_state_dict(weights)
    return model


def new_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    inner = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in inner)]
    return [
        Muon(inner, lr=MUON_RATE, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@dataclass
class Learner:
    """A model in training.

    The replicas share the weights of the model, but have separate gradients, so that several threads
    can work on pieces of one batch.
    """

    name: str
    model: PreTrainedModel
    optimizers: list[torch.optim.Optimizer]
    replicas: queue.SimpleQueue[PreTrainedModel]
    precision: torch.dtype

    @classmethod
    def new(cls, model: PreTrainedModel, name: str, threads: int, precision: torch.dtype) -> Learner:
        """A learner that starts with the weights of the model."""
        optimizers = new_optimizers(model)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]
        replicas: queue.SimpleQueue[PreTrainedModel] = queue.SimpleQueue()
        for _ in range(threads):
            replica = copy.deepcopy(model)
            for parameter, shared in zip(replica.parameters(), model.parameters(), strict=True):
                parameter.data = shared.data
            replicas.put(replica)
        return cls(name, model, optimizers, replicas, precision)

    def learn(self, piece: torch.Tensor, share: float) -> float:
        """Add the gradients of a piece that is this share of its batch. Returns its share of the loss."""
        replica = self.replicas.get()
        loss = mean_loss(replica, piece, self.precision) * share
        loss.backward()
        self.replicas.put(replica)
        return loss.item()

    def update(self, rate: float) -> None:
        """Run one step of the optimizers at that share of the peak learning rate, on the gradients so far."""
        for _ in range(self.replicas.qsize()):
            replica = self.replicas.get()
            for parameter, own in zip(self.model.parameters(), replica.parameters(), strict=True):
                if own.grad is not None:
                    parameter.grad = own.grad if parameter.grad is None else parameter.grad + own.grad
                    own.grad = None
            self.replicas.put(replica)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["peak"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def step(learners: list[Learner], rows: torch.Tensor, rate: float, pool: ThreadPoolExecutor) -> list[float]:
    """Update each learner on the rows and return their losses before the update.

    The pool processes the rows piece by piece, because two threads inside every operator would wait for each
    other whenever another program occupies one of the processors.
    """
    pieces = rows.split(max(1, PIECE // rows.shape[1]))
    work = [
        [pool.submit(learner.learn, piece, len(piece) / len(rows)) for piece in pieces]
        for learner in learners
    ]
    losses = [sum(part.result() for part in parts) for parts in work]
    for learner in learners:
        learner.update(rate)
    return losses


def mean_loss(model: PreTrainedModel, rows: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """The mean cross-entropy of each next token in the rows, with matrix products in that precision."""
    mixed = precision != torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed, cache_enabled=False):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


# --- Time --------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Clock of the active training time and its progress.

    The run ends after `minutes` of active time or at `deadline` (as time.time()), whichever is first.
    """

    minutes: float
    deadline: float | None = None
    active: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def tick(self, expected: float = PAUSE) -> None:
        """Count the time since the last tick, unless it is so long that the process must have been paused."""
        now = time.monotonic()
        gap, self._last = now - self._last, now
        self.active += gap if gap < expected else 0.0

    @property
    def progress(self) -> float:
        """From 0 at the start to 1 at the end."""
        left = 60 * self.minutes - self.active
        if self.deadline is not None:
            left = min(left, self.deadline - time.time())
        return self.active / (self.active + left) if left > 0 else 1.0


def learning_rate(progress: float) -> float:
    """A short warm-up, then a straight line to zero, as a share of the peak."""
    return min(1.0, progress / WARM_UP) * min(1.0, (1 - progress) / (1 - WARM_UP))


def deadline_of(text: str) -> float:
    """The next time that the wall clock shows HH:MM."""
    now = datetime.datetime.now()
    hour, minute = map(int, text.split(":"))
    moment = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (moment if moment > now else moment + datetime.timedelta(days=1)).timestamp()


# --- Files -------------------------------------------------------------------------------------------------


def export(learner: Learner, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a model as bf16 safetensors. Each file is replaced atomically."""
    folder = out / learner.name
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(learner.model)
    model.generation_config = GenerationConfig(bos_token_id=END_ID, eos_token_id=END_ID, pad_token_id=END_ID)
    with tempfile.TemporaryDirectory(dir=out, prefix=".export-") as temporary:
        model.bfloat16().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        tokenizer.backend_tokenizer.save(f"{temporary}/tokenizer.json", pretty=False)  # 2.5 times smaller
        for file in Path(temporary).iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)


def save_checkpoint(folder: Path, learners: list[Learner], batches: Batches, record: Record) -> None:
    """Save everything that a later run needs to resume."""
    tensors = {}
    for learner in learners:
        for name, parameter in learner.model.named_parameters():
            tensors[f"{learner.name}/model/{name}"] = parameter.detach()
        for index, optimizer in enumerate(learner.optimizers):
            for number, values in optimizer.state_dict()["state"].items():
                for key, value in values.items():
                    tensors[f"{learner.name}/optimizer/{index}/{number}/{key}"] = value
    save_file(tensors, folder / "checkpoint.new")
    state = {"batches": batches.state(), "record": asdict(record)}
    (folder / "state.new").write_text(json.dumps(state))
    (folder / "checkpoint.new").replace(folder / "checkpoint.safetensors")
    (folder / "state.new").replace(folder / "state.json")


def load_checkpoint(folder: Path, learners: list[Learner], batches: Batches) -> Record:
    """Resume from a checkpoint."""
    tensors = load_file(folder / "checkpoint.safetensors")
    for learner in learners:
        for name, parameter in learner.model.named_parameters():
            # Into the same memory, which the replicas share.
            parameter.data.copy_(tensors[f"{learner.name}/model/{name}"])
        for index, optimizer in enumerate(learner.optimizers):
            prefix = f"{learner.name}/optimizer/{index}/"
            values: dict[int, dict[str, torch.Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(prefix):
                    number, key = name.removeprefix(prefix).split("/")
                    values.setdefault(int(number), {})[key] = tensor
            optimizer.load_state_dict(
                {"state": values, "param_groups": optimizer.state_dict()["param_groups"]}
            )
    state = json.loads((folder / "state.json").read_text())
    batches.restore(state["batches"])
    return Record(**state["record"])


# --- Training ----------------------------------------------------------------------------------------------


@dataclass
class Record:
    """Facts about a training for the model card."""

    steps: int = 0
    tokens: int = 0
    active: float = 0.0
    command: str = ""
    packages: list[dict[str, str]] = field(default_factory=list)
    documents: dict[str, int] = field(default_factory=dict)
    tokens_per_kind: dict[str, int] = field(default_factory=dict)
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)


@torch.no_grad()
def held_out_loss(learner: Learner, encoded: dict[str, list[Tokens]], most: int) -> dict[str, float]:
    """The loss per token for each kind, on at most that many held-out tokens of it."""
    losses = {}
    for kind in MIX:
        flat = np.concatenate(encoded[kind])[: most + 1].astype(np.int64)
        length = min(512, len(flat) - 1)
        count = (len(flat) - 1) // length
        rows = np.stack([flat[start * length : (start + 1) * length + 1] for start in range(count)])
        pieces = torch.from_numpy(rows).split(16)
        parts = [mean_loss(learner.model, piece, learner.precision).item() * len(piece) for piece in pieces]
        losses[kind] = round(sum(parts) / count, 3)
    return losses


def train(
    learners: list[Learner],
    batches: Batches,
    clock: Clock,
    record: Record,
    tokens_per_step: int,
    pool: ThreadPoolExecutor,
    every: Callable[[float], None],
) -> None:
    """Update every learner on each batch until the time is over."""
    shown, smooth = time.monotonic(), [0.0] * len(learners)
    while (progress := clock.progress) < 1.0:
        length = max(length for start, length in ROWS.items() if progress >= start)
        rows = batches.next(tokens_per_step, length)
        losses = step(learners, rows, learning_rate(progress), pool)
        record.steps += 1
        record.tokens += rows.shape[0] * length
        smooth = [0.98 * old + 0.02 * new if old else new for old, new in zip(smooth, losses, strict=True)]
        clock.tick()
        record.active = clock.active
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            speed = record.tokens / max(clock.active, 1)
            report = f"{progress:6.1%}  step {record.steps}  tokens {record.tokens / 1e6:.2f}M  {speed:.0f}/s"
            print(report, " loss", *(f"{loss:.3f}" for loss in smooth), flush=True)
        every(progress)
        clock.tick(expected=10 * PAUSE)


def periodic(first: float, then: float, action: Callable[[], None], clock: Clock) -> Callable[[float], None]:
    """Run the action after ``first`` active seconds, and then every ``then`` seconds."""
    due = clock.active + first

    def every(progress: float) -> None:
        nonlocal due
        if clock.active >= due and progress < 1.0:
            action()
            due = clock.active + then

    return every


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {GSM8K_FILE} and {PROSE_FILE}")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the two model folders to")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder to resume from")
    parser.add_argument("--minutes", type=float, default=90.0, help="active time to train for")
    parser.add_argument("--until", metavar="HH:MM", help="end by this time at the latest")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of matrix products; bfloat16 is slow on processors without instructions for it",
    )
    parser.add_argument("--init", type=Path, help="folder with an earlier pair of models to start from")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in (GSM8K_FILE, PROSE_FILE):
        if not (options.data / name).is_file():
            parser.error(f"--data: there is no {name} in {options.data}")
    return options


def command_of(options: argparse.Namespace) -> str:
    """The command for the model card, without the folders of this machine."""
    parts = [
        "python lab/tools/train_nano.py --data DATA --out src/outpace/models",
        f"--minutes {options.minutes:g}",
    ]
    if options.until:
        parts.append(f"--until {options.until}")
    if options.init:
        parts.append("--init INIT")
    parts.append(f"--precision {options.precision} --tokens-per-step {options.tokens_per_step}")
    parts.append(f"--threads {options.threads} --seed {options.seed}")
    return " ".join(parts)


def record_of(options: argparse.Namespace, corpus: Corpus, training: dict[str, list[Tokens]]) -> Record:
    """A record of what goes into the training; the rest is counted as it runs."""
    record = Record(command=command_of(options), packages=[asdict(package) for package in corpus.packages])
    for kind, documents in training.items():
        record.documents[kind] = len(documents)
        record.tokens_per_kind[kind] = sum(map(len, documents))
        print(f"{kind:12} {len(documents):6} documents {record.tokens_per_kind[kind] / 1e6:6.2f}M tokens")
    return record


def check_same_data(earlier: Record, now: Record) -> None:
    """Refuse to resume with other documents, since the tokenizer and the held-out texts would differ.

    Raises:
        SystemExit: they are not the documents of the earlier run.
    """
    if (earlier.packages, earlier.documents) == (now.packages, now.documents):
        return
    before, after = (
        {f"{package['name']} {package['version']}" for package in run.packages} for run in (earlier, now)
    )
    raise SystemExit(
        "the checkpoint is of a run on other documents "
        f"(packages gone: {sorted(before - after)}, new: {sorted(after - before)}); "
        "train in an environment with the same packages, or give another folder as --checkpoints"
    )


def main() -> None:
    """Build the corpus, train both models, and write them with what the model card needs."""
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    print("reading the corpus", flush=True)
    corpus = build_corpus(options.data, options.seed)
    tokenizer = train_tokenizer(corpus, options.seed)
    training = {kind: encode(tokenizer, corpus.train[kind]) for kind in MIX}
    held_out = {kind: encode(tokenizer, corpus.held_out[kind]) for kind in MIX}

    batches = Batches.of(training, options.seed)
    learners = []
    for name in (TARGET, DRAFT):
        model = warm_model(name, options.init / name, tokenizer) if options.init else new_model(name)
        learners.append(Learner.new(model, name, options.threads, getattr(torch, options.precision)))
    for learner in learners:
        print(f"{learner.name}: {learner.model.num_parameters():,} parameters", flush=True)
    record = record_of(options, corpus, training)
    if (options.checkpoints / "state.json").is_file():
        earlier = load_checkpoint(options.checkpoints, learners, batches)
        check_same_data(earlier, record)
        record = replace(earlier, command=f"{earlier.command}\n{record.command}")
        print(f"going on after {record.tokens / 1e6:.2f}M tokens", flush=True)
    (options.checkpoints / "held_out.json").write_text(json.dumps(corpus.held_out))
    clock = Clock(options.minutes, options.until and deadline_of(options.until), active=record.active)

    def interim() -> None:
        for learner in learners:
            export(learner, tokenizer, options.out)
            print(f"  held out, {learner.name}: {held_out_loss(learner, held_out, 4096)}", flush=True)
        save_checkpoint(options.checkpoints, learners, batches, record)

    pool = ThreadPoolExecutor(options.threads, initializer=torch.set_num_threads, initargs=(1,))
    every = periodic(300, 600, interim, clock)
    train(learners, batches, clock, record, options.tokens_per_step, pool, every)
    for learner in learners:
        export(learner, tokenizer, options.out)
        record.held_out[learner.name] = held_out_loss(learner, held_out, 50_000)
        print(f"held out, {learner.name}: {record.held_out[learner.name]}", flush=True)
    save_checkpoint(options.checkpoints, learners, batches, record)
    (options.checkpoints / "record.json").write_text(json.dumps(asdict(record), indent=2) + "\n")


if __name__ == "__main__":
    main()

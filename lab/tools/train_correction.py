"""Train a small encoder-decoder model to correct sentences: a target for drafters to be trained for.

    python lab/measure/passages.py FOLDER ... --out passages.txt
    python lab/tools/train_correction.py --documents passages.txt --out FOLDER --minutes 12

Sentences are taken from the passages; the source is a sentence typed in haste: spelling errors, no capitals,
no punctuation, and about a third of the articles missing. The architecture is that of Pegasus, the learning
rate falls to zero over the time given; `--start` goes on with the weights of an earlier run. FOLDER gets the
model with its tokenizer, sources that were not learnt (`prompts.jsonl` for drafters, `test.jsonl` for
measuring), and what was learnt (`pairs.jsonl`).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PegasusConfig, PegasusForConditionalGeneration, PreTrainedTokenizerFast

from corpus import misspell, sentences_of

PAD, END = "<pad>", "</s>"
VOCABULARY = 4096
TOGETHER = 500  # tokens of sources in a batch, pads included
PEAK, WARMUP = 1e-3, 0.05  # of the learning rate, and the share of the time in which it rises
TEST, PROMPTS = 200, 6_000

Pair = tuple[list[int], list[int]]


def sentences(file: Path) -> list[str]:
    """Sentences of plain English, each once."""
    plain = re.compile(r"[A-Z][A-Za-z0-9 ,;:'()\-]+[.!?]")
    lines = file.read_text("utf-8").splitlines()
    found = [part for line in lines for part in sentences_of(line) if plain.fullmatch(part)]
    return [part for part in dict.fromkeys(found) if 6 <= len(part.split()) <= 30]


def in_haste(text: str, rng: random.Random) -> str:
    """A sentence as somebody typed it in haste."""
    text = re.sub(r"\b(?:a|an|the) ", lambda word: "" if rng.random() < 0.3 else word[0], text.lower())
    return re.sub(r"[^a-z0-9' ]", "", misspell(text, rng).replace("-", " ").lower())


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel()
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    core.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)


def batches(pairs: Sequence[Pair], rng: random.Random) -> Iterator[list[Pair]]:
    """Batches of pairs of like length, without end."""
    while True:
        # Noise on the length makes other batches in each round.
        order = sorted(pairs, key=lambda pair: len(pair[1]) + rng.random() * 4)
        made: list[list[Pair]] = [[]]
        for pair in order:
            if made[-1] and len(pair[0]) * (len(made[-1]) + 1) > TOGETHER:
                made.append([])
            made[-1].append(pair)
        rng.shuffle(made)
        yield from made


def loss_of(model: PegasusForConditionalGeneration, batch: Sequence[Pair]) -> torch.Tensor:
    source, answer = (
        pad_sequence([torch.tensor(pair[part]) for pair in batch], batch_first=True) for part in (0, 1)
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = model(
            input_ids=source, attention_mask=source != 0, labels=answer.masked_fill(answer == 0, -100)
        ).loss
    return loss


def train(model: PegasusForConditionalGeneration, pairs: Sequence[Pair], seconds: float) -> int:
    """Train for a time; the number of tokens seen, sources and answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.01)
    began, seen = time.monotonic(), 0
    model.train()
    for step, batch in enumerate(batches(pairs, random.Random(1))):
        done = (time.monotonic() - began) / seconds
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(done / WARMUP, (1 - done) / (1 - WARMUP))
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += sum(len(part) for pair in batch for part in pair)
        if step % 200 == 0:
            print(f"{done:4.0%}  step {step}  {seen} tokens  loss {loss.item():.3f}", flush=True)
    model.eval()
    return seen


def write(file: Path, lines: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=Path, required=True, help="a text of one passage a line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="FOLDER of an earlier run on the same passages, to go on")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    rng = random.Random(given.seed)
    answers = sentences(given.documents)
    sources = [in_haste(text, rng) for text in answers]
    if given.start is None:
        tokenizer = train_tokenizer([*sources[:20_000], *answers[:20_000]])
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(given.start)
    pairs = list(zip(*(tokenizer(texts).input_ids for texts in (sources, answers)), strict=True))
    aside = TEST + PROMPTS
    print(f"{len(pairs) - aside} sentences, {sum(len(pair[1]) for pair in pairs[aside:])} tokens of answers")
    config = PegasusConfig(
        vocab_size=VOCABULARY,
        d_model=192,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=256,
        scale_embedding=True,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    if given.start is None:
        model = PegasusForConditionalGeneration(config)
    else:
        model = PegasusForConditionalGeneration.from_pretrained(given.start)
    seen = train(model, pairs[aside:], 60 * given.minutes)
    with torch.no_grad():
        held_out = sum(loss_of(model, [pair]).item() for pair in pairs[:TEST]) / TEST
    print(f"{seen} tokens seen, held-out loss {held_out:.3f}")
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    both = list(zip(sources, answers, strict=True))
    write(given.out / "test.jsonl", ({"prompt": source} for source, _ in both[:TEST]))
    write(given.out / "prompts.jsonl", ({"prompt": source} for source, _ in both[TEST:aside]))
    write(given.out / "pairs.jsonl", ({"prompt": source, "response": text} for source, text in both[aside:]))


if __name__ == "__main__":
    main()

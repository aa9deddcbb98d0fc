"""Train a small hybrid of Qwen3.5's shape: recurrent layers, of which every fourth attends to all positions.

    python lab/tools/train_hybrid.py --data DATA --out FOLDER --minutes 40

It learns from the texts of outpace-nano, with its tokenizer, as train_nano.py does. Nothing of it is in the
package: it is a target whose answers are not noise, for measurements of drafters on models with a recurrent state.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from corpus import build_corpus
from train_nano import (
    CONTEXT,
    END_ID,
    MIX,
    TARGET,
    VOCABULARY,
    Batches,
    Clock,
    Learner,
    Record,
    encode,
    export,
    held_out_loss,
    periodic,
    train,
)

NAME = "outpace-hybrid"
MODELS = Path(__file__).parents[2] / "src" / "outpace" / "models"


def new_hybrid() -> Qwen3_5ForCausalLM:
    """A hybrid with random weights: three layers of the gated delta rule, and one of attention."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=48,
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=None,
    )
    return Qwen3_5ForCausalLM(config)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the data of train_nano.py")
    parser.add_argument("--out", type=Path, required=True, help=f"folder to write the folder {NAME} to")
    parser.add_argument("--minutes", type=float, default=40.0, help="active time to train for")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Build the corpus, train, and write the model."""
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    corpus = build_corpus(options.data, options.seed)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / TARGET)
    training = {kind: encode(tokenizer, corpus.train[kind]) for kind in MIX}
    held_out = {kind: encode(tokenizer, corpus.held_out[kind]) for kind in MIX}
    learner = Learner.new(new_hybrid(), NAME, options.threads, getattr(torch, options.precision))
    print(f"{NAME}: {learner.model.num_parameters():,} parameters", flush=True)
    batches, clock, record = Batches.of(training, options.seed), Clock(options.minutes), Record()
    pool = ThreadPoolExecutor(options.threads, initializer=torch.set_num_threads, initargs=(1,))
    interim = periodic(300, 600, lambda: export(learner, tokenizer, options.out), clock)
    train([learner], batches, clock, record, options.tokens_per_step, pool, interim)
    export(learner, tokenizer, options.out)
    print(f"tokens {record.tokens:,}, held out: {held_out_loss(learner, held_out, 50_000)}", flush=True)


if __name__ == "__main__":
    main()

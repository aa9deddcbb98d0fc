"""Train a small hybrid of Qwen3.5's shape: recurrent layers, of which every fourth attends to all positions.

    python lab/tools/train_hybrid.py --data DATA --out FOLDER --minutes 40

It starts with the weights of outpace-nano where both have the same, and learns from its texts with its
tokenizer, as train_nano.py does. Nothing of it is in the package: it is a target whose answers are not noise,
for measurements of drafters on models with a recurrent state.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from corpus import build_corpus
from outpace import nano_path
from train_nano import (
    END_ID,
    MIX,
    Batches,
    Clock,
    Learner,
    Record,
    deadline_of,
    encode,
    export,
    held_out_loss,
    periodic,
    train,
)

NAME = "outpace-hybrid"
RATE = 0.4
"""The peak of the learning rate, as a share of that of a model that starts from nothing."""


def new_hybrid(folder: Path) -> Qwen3_5ForCausalLM:
    """A hybrid that starts with the weights of a Llama model; what is new in it is random, or does little.

    Queries, keys, values and outputs of attention become those of the delta rule: Wang et al., The Mamba in
    the Llama, arXiv 2408.15237, section 2.
    """
    old = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shape = old.config
    config = Qwen3_5TextConfig(
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=shape.num_attention_heads,
        linear_num_value_heads=shape.num_attention_heads,
        linear_key_head_dim=shape.head_dim,
        linear_value_head_dim=shape.head_dim,
        rope_parameters={**shape.rope_parameters, "partial_rotary_factor": 1.0},
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
    )
    model = Qwen3_5ForCausalLM(config)
    weights = {name: value for name, value in old.state_dict().items() if "self_attn" not in name}
    for name in weights:
        if "norm" in name:
            weights[name] = weights[name] - 1  # Qwen's norms multiply by one more than their weights
    for place, (layer, kind) in enumerate(zip(old.model.layers, config.layer_types, strict=True)):
        convert = _attention if kind == "full_attention" else _delta_rule
        part = "self_attn" if kind == "full_attention" else "linear_attn"
        found = convert(layer.self_attn, shape)
        weights |= {f"model.layers.{place}.{part}.{name}": value for name, value in found.items()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    if unknown:
        raise ValueError(f"the model has no {', '.join(unknown)}")
    print(f"new: {', '.join(sorted({name.split('.', 3)[-1] for name in missing}))}", flush=True)
    return model


def _attention(old: LlamaAttention, shape: LlamaConfig) -> dict[str, torch.Tensor]:
    """Attention whose gate is open by half, its outputs twice as large."""
    queries = old.q_proj.weight.detach().view(-1, shape.head_dim, shape.hidden_size)
    return {
        "q_proj.weight": torch.cat([queries, 0 * queries], 1).flatten(0, 1),
        "k_proj.weight": old.k_proj.weight.detach(),
        "v_proj.weight": old.v_proj.weight.detach(),
        "o_proj.weight": 2 * old.o_proj.weight.detach(),
    }


def _delta_rule(old: LlamaAttention, shape: LlamaConfig) -> dict[str, torch.Tensor]:
    """The delta rule of attention's projections: a convolution of one position, heads that forget slowly."""
    groups = shape.num_attention_heads // shape.num_key_value_heads
    keys, values = (
        own.weight.detach().view(-1, shape.head_dim, shape.hidden_size).repeat_interleave(groups, 0)
        for own in (old.k_proj, old.v_proj)
    )
    projections = torch.cat([old.q_proj.weight.detach(), keys.flatten(0, 1), values.flatten(0, 1)])
    convolution = torch.zeros(len(projections), 1, 4)
    convolution[..., -1] = 1
    return {
        "in_proj_qkv.weight": projections,
        "conv1d.weight": convolution,
        "A_log": torch.linspace(0.01, 1.0, shape.num_attention_heads).log(),
        "out_proj.weight": old.o_proj.weight.detach(),
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the data of train_nano.py")
    parser.add_argument("--out", type=Path, required=True, help=f"folder to write the folder {NAME} to")
    parser.add_argument("--start", type=Path, help="folder of an earlier run, to go on from its weights")
    parser.add_argument("--minutes", type=float, default=40.0, help="active time to train for")
    parser.add_argument("--until", metavar="HH:MM", help="end by this time at the latest")
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
    tokenizer = AutoTokenizer.from_pretrained(nano_path())
    training = {kind: encode(tokenizer, corpus.train[kind]) for kind in MIX}
    held_out = {kind: encode(tokenizer, corpus.held_out[kind]) for kind in MIX}
    learner = Learner.new(new_hybrid(nano_path()), NAME, options.threads, getattr(torch, options.precision))
    for optimizer in learner.optimizers:
        for group in optimizer.param_groups:
            group["peak"] *= RATE
    print(f"{NAME}: {learner.model.num_parameters():,} parameters", flush=True)
    end = deadline_of(options.until) if options.until else None
    batches, clock, record = Batches.of(training, options.seed), Clock(options.minutes, end), Record()
    pool = ThreadPoolExecutor(options.threads, initializer=torch.set_num_threads, initargs=(1,))
    interim = periodic(300, 600, lambda: export(learner, tokenizer, options.out), clock)
    train([learner], batches, clock, record, options.tokens_per_step, pool, interim)
    export(learner, tokenizer, options.out)
    print(f"tokens {record.tokens:,}, held out: {held_out_loss(learner, held_out, 50_000)}", flush=True)


if __name__ == "__main__":
    main()

"""Compare vLLM with outpace's drafters, with its own ngram and suffix, and without drafts.

Run with the Python of an environment that has vLLM and outpace-vllm:

    python integrations/vllm/end_to_end.py --model FOLDER --datastore FILE

Each method has a process of its own. It decodes all prompts greedily: one after another, together, and
together with a repetition penalty. The exit status is 1 if tokens differ from those without drafts, or if
nothing that a drafter of outpace's drafted is accepted. Prefixes are not cached. Speeds are of processor time
of the whole process, over the prompts decoded one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outpace.bench.suites import load_suite
from outpace.embedded import nano_path

TOKENS = 8  # per draft


def speculation(method: str) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a method."""
    if method == "plain":
        return {}
    if method == "ngram":
        config = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    elif method == "suffix":
        config = {"method": "suffix"}
    else:
        config = {"method": "custom_class", "model": "outpace_vllm.Proposer"}
    options: dict[str, Any] = {"speculative_config": {**config, "num_speculative_tokens": TOKENS}}
    if config["method"] == "custom_class":
        options["additional_config"] = {"outpace": method.removeprefix("outpace/")}
    return options


def decode(method: str, model: str, suite: str, count: int, length: int) -> dict[str, Any]:
    """Decode with a method in this process."""
    import vllm
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [item.turns[0] for item in load_suite(suite).first(count).items]
    prompts = [{"prompt_token_ids": tokenizer(text).input_ids} for text in texts]
    llm = vllm.LLM(
        model=model,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,  # fewer than prompts, so that rows are reused
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **speculation(method),
    )

    def run(together: bool, penalty: float = 1.0) -> tuple[list[list[int]], float]:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=length, repetition_penalty=penalty, ignore_eos=True
        )
        began = time.process_time()
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        answers = [one for batch in batches for one in llm.generate(batch, params, use_tqdm=False)]
        return [list(one.outputs[0].token_ids) for one in answers], time.process_time() - began

    def counted(name: str) -> int:
        return sum(
            metric.value for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_num_{name}"
        )

    # Another text first, so that what is compiled on first use does not count, and no answer is remembered.
    warm = {"prompt_token_ids": tokenizer("one two three four " * 8).input_ids}
    llm.generate([warm], vllm.SamplingParams(temperature=0, max_tokens=length), use_tqdm=False)
    before = counted("draft_tokens"), counted("accepted_tokens")
    alone, seconds = run(together=False)
    after = counted("draft_tokens"), counted("accepted_tokens")
    return {
        "alone": alone,
        "together": run(together=True)[0],
        "penalised": run(together=True, penalty=1.3)[0],
        "seconds": seconds,
        "drafted": after[0] - before[0],
        "accepted": after[1] - before[1],
    }


def ask(method: str, arguments: list[str]) -> dict[str, Any]:
    """Decode with a method in a process of its own."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [sys.executable, __file__, *arguments, "--method", method]
    done = subprocess.run(command, env=settings | os.environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{method} failed; the reason is above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(methods: list[str], arguments: list[str]) -> bool:
    """Print a table; return False if a method fails."""
    good = True
    plain = ask("plain", arguments)
    tokens = sum(map(len, plain["alone"]))
    print(f"{len(plain['alone'])} prompts, {tokens} tokens without drafts in {plain['seconds']:.2f} s")
    print("| method | drafted | accepted | speed | alone | together | penalised |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for method in methods:
        found = ask(method, arguments)
        equal = []
        for kind in ("alone", "together", "penalised"):
            same = sum(a == b for a, b in zip(found[kind], plain[kind], strict=True))
            equal.append(f"{same} of {len(plain[kind])}")
            good = good and same == len(plain[kind])
        accepted = int(found["accepted"])
        good = good and (accepted > 0 or not method.startswith("outpace/"))
        speed = plain["seconds"] / found["seconds"]
        row = [method, str(int(found["drafted"])), str(accepted), f"{speed:.2f} x", *equal]
        print(f"| {' | '.join(row)} |", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(nano_path()), help="folder; by default the embedded model")
    parser.add_argument("--datastore", help="one that `outpace datastore build` wrote, for retrieval")
    parser.add_argument("--suite", default="builtin", help="as for `outpace bench`")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="per prompt")
    parser.add_argument("--methods", help="by default all, joined by spaces: ngram suffix outpace/suffix ...")
    parser.add_argument("--method", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.method:
        found = decode(given.method, given.model, given.suite, given.prompts, given.tokens)
        print(json.dumps(found))
        return
    methods = ["ngram", "suffix", "outpace/prompt_lookup", "outpace/suffix", "outpace/reference"]
    if given.datastore:
        methods.append(f"outpace/retrieval:path={Path(given.datastore).resolve()}")
    if given.methods:
        methods = given.methods.split()
    options = ["--model", given.model, "--suite", given.suite]
    options += ["--prompts", str(given.prompts), "--tokens", str(given.tokens)]
    if not report(methods, options):
        sys.exit("tokens differ from those without drafts, or nothing was accepted")


if __name__ == "__main__":
    main()

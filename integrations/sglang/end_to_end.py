"""Compare SGLang with outpace's drafters, with its own NGRAM, and without drafts, on a CPU.

Run with the Python of an environment that has SGLang and outpace-sglang:

    python integrations/sglang/end_to_end.py --model FOLDER

Each method has a process of its own. It decodes all prompts greedily: one after another, and together. The
exit status is 1 if tokens differ from those without drafts, if nothing that a drafter of outpace's drafted is
accepted, or if a penalty is not refused. Prefixes are not cached. Speeds are of processor time of SGLang's
processes, over the prompts decoded one after another. Without SGLang's compiled CPU kernels,
`cpu_kernels.py` does their work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

NODES = 32
HERE = Path(__file__).parent
METADATA = "Metadata-Version: 2.1\nName: sgl_kernel_in_torch\nVersion: 0\n"
PLUGIN = "[sglang.srt.plugins]\ntorch_trees = sgl_kernel:attend\n"


def decode(method: str, given: argparse.Namespace) -> dict[str, Any]:
    """Decode with a method in this process and those that SGLang starts."""
    import psutil
    import sglang
    from transformers import AutoTokenizer

    from outpace.bench.suites import load_suite

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    texts = [item.turns[0] for item in load_suite(given.suite).first(given.prompts).items]
    prompts = [tokenizer(text).input_ids for text in texts]
    options: dict[str, Any] = {}
    if method != "plain":
        options["speculative_algorithm"] = "OUTPACE" if method.startswith("outpace/") else method
        options["speculative_num_draft_tokens"] = NODES
    engine = sglang.Engine(
        model_path=given.model,
        dtype="float32",
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        max_running_requests=4,  # fewer than prompts
        max_total_tokens=8192,
        context_length=1024,
        log_level="error",
        **options,
    )

    def seconds() -> float:
        processes = psutil.Process().children(recursive=True)
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def run(batch: Any) -> Any:
        return engine.generate(
            input_ids=batch,
            sampling_params={"temperature": 0, "max_new_tokens": given.tokens, "ignore_eos": True},
        )

    # Another text first, so that what is compiled on first use does not count.
    run(tokenizer("one two three four " * 8).input_ids)
    before = seconds()
    alone = [run(prompt) for prompt in prompts]
    used = seconds() - before
    together = run(prompts)
    refused = ""
    if method.startswith("outpace/"):
        try:
            engine.generate(
                input_ids=prompts[0], sampling_params={"temperature": 0, "repetition_penalty": 1.3}
            )
        except ValueError as error:
            refused = str(error)
    engine.shutdown()
    # Each verification emits its accepted tokens and one more; the first token comes from the prompt.
    steps = sum(int(one["meta_info"].get("spec_verify_ct", given.tokens - 1)) for one in alone)
    return {
        "alone": [one["output_ids"] for one in alone],
        "together": [one["output_ids"] for one in together],
        "seconds": used,
        "steps": steps,
        "refused": refused,
    }


def ask(method: str, arguments: list[str], folder: str) -> dict[str, Any]:
    """Decode with a method in a process of its own."""
    settings = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NATIVE_MOVE_KV_CACHE": "1",
        "OUTPACE_DRAFTER": method.removeprefix("outpace/"),
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")])),
    }
    command = [sys.executable, __file__, *arguments, "--method", method]
    done = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{method} failed; the reason is above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compiled() -> bool:
    """True if SGLang's kernels can be loaded; the wheel on PyPI needs CUDA's driver."""
    try:
        import_module("sgl_kernel")
    except ImportError:
        return False
    return True


def kernels(folder: str) -> None:
    """Write the stand-in for SGLang's compiled kernels, with its plugin, into a folder."""
    package, listed = Path(folder, "sgl_kernel"), Path(folder, "sgl_kernel_in_torch-0.dist-info")
    package.mkdir()
    text = (HERE / "cpu_kernels.py").read_text("utf-8")
    (package / "__init__.py").write_text(text, "utf-8")
    (package / "speculative.py").write_text(
        "from sgl_kernel import reconstruct_indices_from_tree_mask as reconstruct_indices_from_tree_mask\n",
        "utf-8",
    )
    listed.mkdir()
    (listed / "METADATA").write_text(METADATA, "utf-8")
    (listed / "entry_points.txt").write_text(PLUGIN, "utf-8")


def report(methods: list[str], arguments: list[str], folder: str) -> bool:
    """Print a table; return False if a method fails."""
    good = True
    plain = ask("plain", arguments, folder)
    tokens = sum(map(len, plain["alone"]))
    print(f"{len(plain['alone'])} prompts, {tokens} tokens without drafts in {plain['seconds']:.2f} s")
    print("| method | tokens per step | speed | alone | together |")
    print("| --- | ---: | ---: | ---: | ---: |", flush=True)
    for method in methods:
        found = ask(method, arguments, folder)
        equal = []
        for kind in ("alone", "together"):
            same = sum(a == b for a, b in zip(found[kind], plain[kind], strict=True))
            equal.append(f"{same} of {len(plain[kind])}")
            good = good and same == len(plain[kind])
        mean = (tokens - len(plain["alone"])) / found["steps"]
        if method.startswith("outpace/"):
            good = good and mean > 1 and "leave it out" in found["refused"]
        row = [method, f"{mean:.2f}", f"{plain['seconds'] / found['seconds']:.2f} x", *equal]
        print(f"| {' | '.join(row)} |", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder; by default the embedded model")
    parser.add_argument("--suite", default="builtin", help="as for `outpace bench`")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="per prompt")
    parser.add_argument("--methods", help="by default all, joined by spaces: NGRAM outpace/suffix ...")
    parser.add_argument("--method", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.model is None:
        from outpace.embedded import nano_path

        given.model = str(nano_path())
    if given.method:
        found = decode(given.method, given)
        print(json.dumps(found))
        return
    methods = ["NGRAM", "outpace/lookahead:window=3,ngram=4,guesses=7", "outpace/suffix"]
    methods += ["outpace/token_recycling", "outpace/combined:(suffix)+(token_recycling)"]
    if given.methods:
        methods = given.methods.split()
    options = ["--model", given.model, "--suite", given.suite]
    options += ["--prompts", str(given.prompts), "--tokens", str(given.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        if not compiled():
            kernels(folder)
        if not report(methods, options, folder):
            sys.exit(
                "tokens differ from those without drafts, nothing was accepted, or a penalty was not refused"
            )


if __name__ == "__main__":
    main()

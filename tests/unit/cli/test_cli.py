"""The command line from a user's point of view: output, streams, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
)
from typer.testing import CliRunner

import outpace
from folders import CONTEXT, save_llama
from outpace.cli import app
from outpace.engine.engine import Engine
from outpace.verify import VERIFIERS
from outpace.verify.match import Match
from parts import first

PROMPT = "abcabcabc"
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """The greedy output of transformers itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=24, do_sample=False, use_cache=False)
    return found[0, ids.shape[1] :].tolist()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``outpace`` in this process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(*args: Any, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)

    return invoke


def refused(result: Any, message: str, code: int = 2) -> None:
    """A clear message, the exit code of a mistake, and nothing that looks like a crash."""
    assert message in " ".join(result.stderr.split()), result.output
    assert result.exit_code == code
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)


# -- start-up --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["generate", "--help"]])
def test_help_loads_neither_torch_nor_transformers(args: list[str]) -> None:
    code = (
        "import sys\nfrom outpace.cli import app\n"
        f"try:\n    app({args})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('heavy:', sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("heavy: []"), done.stderr


def test_a_mistake_in_the_options_is_told_before_torch_loads() -> None:
    code = (
        "import sys\nfrom outpace.cli import app\n"
        "try:\n    app(['generate', '--prompt', 'x', '--temperature', 'nan'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False"], done.stderr


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"outpace {outpace.__version__}\n"


def test_it_runs_as_a_module() -> None:
    found = subprocess.run([sys.executable, "-m", "outpace", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout.split()[0]) == (0, "outpace")


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "generate",
        "chat",
        "drafters",
        "bench",
    ],
)
def test_help_has_an_example(run: Run, command: str) -> None:
    shown = run(*command.split(), "--help").stdout
    assert f"Example: outpace {command}" in shown


# -- generate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["none", "lookahead", "lookahead:window=3,ngram=3,guesses=2"])
def test_generate_json_has_the_tokens_of_transformers(
    run: Run, folder: Path, expected: list[int], spec: str
) -> None:
    # Without a governor, whose choices depend on the clock.
    result = run("generate", "-m", folder, "-d", spec, "-p", PROMPT, "-n", 24, "--json", "--no-adaptive")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tokens"] == expected
    assert found["text"] == AutoTokenizer.from_pretrained(folder).decode(expected)
    assert found["finish_reason"] == "length"
    stats = found["stats"]
    assert stats["tokens"] == 24
    assert stats["mean_accepted_length"] == 24 / stats["steps"]
    assert stats["steps"] == 24 if spec == "none" else stats["drafted"] > 0


def test_generate_streams_text_and_keeps_statistics_apart(
    run: Run, folder: Path, expected: list[int]
) -> None:
    result = run("generate", "-m", folder, "-p", PROMPT, "-n", 24)
    text = AutoTokenizer.from_pretrained(folder).decode(expected)
    assert result.stdout == text + "\n"
    assert "24 tokens in" in result.stderr


def test_stdin_and_a_text_file_lose_their_last_line_break_only(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("one\n\n", "utf-8")
    for result in (
        run("generate", "-m", folder, "-n", 2, "--json", stdin="one\n\n"),
        run("generate", "-m", folder, "-n", 2, "--json", "--file", file),
    ):
        assert json.loads(result.stdout)["prompt"] == "one\n"


def test_jsonl_takes_every_kind_of_line(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "p", "question": "no"}', "", '{"question": "q"}', '{"turns": ["t", "u"]}', '"s"']
    file.write_text("\n".join(lines) + "\n", "utf-8")
    result = run("generate", "-m", folder, "-f", file, "-n", 6, "--json", "--batch", 3)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert {(one["index"], one["prompt"]) for one in found} == {(0, "p"), (1, "q"), (2, "t"), (3, "s")}
    assert "4 of 4 prompts" in result.stderr
    for one in found:
        alone = run("generate", "-m", folder, "-p", one["prompt"], "-n", 6, "--json")
        assert json.loads(alone.stdout)["tokens"] == one["tokens"]


def test_jsonl_as_text_names_the_lines(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a"\n\n"b"\n', "utf-8")
    shown = run("generate", "-m", folder, "-f", file, "-n", 3).stdout
    assert "== line 1 ==" in shown and "== line 3 ==" in shown


def test_out_is_not_replaced_unless_asked(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ("generate", "-m", folder, "-p", "x", "-n", 2, "--json", "--out", out)
    assert run(*args).stdout == ""
    first = out.read_text("utf-8")
    assert json.loads(first)["stats"]["tokens"] == 2
    refused(run(*args), "would be lost")
    assert out.read_text("utf-8") == first
    # A run that fails before it has a result leaves the old one alone, asked or not.
    refused(run(*args, "--overwrite", "--drafter", "nothing"), "no drafter 'nothing'")
    assert out.read_text("utf-8") == first
    assert run(*args, "--overwrite").exit_code == 0


def test_sampling_options_arrive(run: Run, folder: Path) -> None:
    args = ("generate", "-m", folder, "-p", PROMPT, "-n", 12, "--json", "--temperature", 0.9, "--seed", 5)
    one, two = (json.loads(run(*args, "-d", spec).stdout) for spec in ("none", "lookahead"))
    assert one["seed"] == 5 and one["tokens"] == two["tokens"]
    other = json.loads(run(*args, "--top-k", 2, "--repetition-penalty", 1.5).stdout)
    assert other["tokens"] != one["tokens"]
    stop = one["text"][3]
    stopped = json.loads(run(*args, "--stop", "never", "--stop", stop).stdout)
    assert stopped["finish_reason"] == "stop" and stopped["text"] == one["text"].partition(stop)[0]


def test_logprobs_need_json(run: Run, folder: Path) -> None:
    args = ("generate", "-m", folder, "-p", PROMPT, "-n", 3, "--logprobs", 2)
    refused(run(*args), "add --json")
    found = json.loads(run(*args, "--json").stdout)["logprobs"]
    assert len(found) == 3 and all(len(entry["top"]) == 2 for entry in found)
    texts = {(one["token"], one["text"]) for entry in found for one in (entry, *entry["top"])}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert texts == {(token, tokenizer.decode([token])) for token, _ in texts}
    assert [entry["logprob"] for entry in found] == [entry["top"][0]["logprob"] for entry in found]  # greedy


def test_an_error_in_the_middle_begins_a_line_of_its_own(run: Run, folder: Path) -> None:
    args = ("--verifier", "block", "-d", "lookahead:window=3,ngram=3", "-t", 1, "--seed", 0)
    result = run("generate", "-m", folder, "-p", PROMPT, "-n", 40, *args)
    assert result.exit_code == 2 and "verifies chains" in result.stderr
    assert result.stdout == "" or result.stdout.endswith("\n")


def test_a_full_context_is_said(run: Run, folder: Path) -> None:
    result = run("generate", "-m", folder, "-p", "x" * (CONTEXT - 3), "-n", 50)
    assert "3 tokens in" in result.stderr and "context is full" in result.stderr


# -- generate --compare ----------------------------------------------------------------------------------


def test_compare(run: Run, folder: Path, expected: list[int]) -> None:
    args = ("generate", "-m", folder, "-p", PROMPT, "-n", 24, "--compare", "--repeats", 2)
    result = run(*args)
    assert result.exit_code == 0
    assert result.stdout.endswith("equal: yes\n")
    found = json.loads(run(*args, "--json").stdout)
    assert found["equal"] is True and found["first_difference"] is None
    assert found["plain"]["tokens"] == found["accelerated"]["tokens"] == expected
    assert found["plain"]["stats"]["steps"] == 24
    assert len(found["plain"]["seconds"]) == len(found["accelerated"]["seconds"]) == 2
    ratio = found["plain"]["median_seconds"] / found["accelerated"]["median_seconds"]
    assert found["speed_ratio"] == pytest.approx(ratio)


class Liar(Match):
    """A verifier that changes the sixth token."""

    def verify(self, logits: Any, draft: Any, draw: Any) -> Any:
        token = draw.token
        draw.token = lambda *at: 7 if draw.sequence.output_length == 5 else token(*at)
        return super().verify(logits, draft, draw)


def test_compare_of_unequal_outputs_fails_and_shows_where(
    run: Run, folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "liar", Liar)
    args = ("generate", "-m", folder, "-p", PROMPT, "-n", 24, "--compare", "--verifier", "liar")
    result = run(*args)
    assert result.exit_code == 1
    assert "equal: no\n  token 6 is" in result.stdout
    assert "apart in log probability" in result.stdout.replace("\n", " ")
    found = json.loads(run(*args, "--json").stdout)
    assert found["equal"] is False
    assert found["first_difference"]["index"] == 5
    assert found["first_difference"]["plain"] == expected[5]
    assert found["first_difference"]["other"] == 7


def test_compare_does_not_fail_where_equality_is_not_promised(run: Run, folder: Path) -> None:
    args = ("generate", "-m", folder, "-p", PROMPT, "-n", 24, "--compare", "--repeats", 1)
    result = run(*args, "--verifier", "rejection", "-d", "none", "-t", 1, "--seed", 1)
    assert result.exit_code == 0
    assert "equal: no" in result.stdout and "preserves the distribution" in result.stdout


def test_compare_over_many_prompts_names_the_line_that_differs(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a"\n\n"b"\n', "utf-8")
    args = ("generate", "-m", folder, "-f", file, "-n", 8, "--compare", "--repeats", 1)
    assert "equal: yes, all 2 prompts" in run(*args).stdout
    monkeypatch.setitem(VERIFIERS, "liar", Liar)
    result = run(*args, "--verifier", "liar")
    assert result.exit_code == 1 and "line 3: token 6" in result.stdout
    assert [json.loads(line)["equal"] for line in run(*args, "--json").stdout.splitlines()] == [True, True]


# -- lossy verifiers -------------------------------------------------------------------------------------

# Anything drafted stands, so that the output moves: the copies of prompt lookup are not what is said.
LOSSY = ("--verifier", "loose:Loose", "-d", "prompt_lookup:min_ngram=1")
NAME = "loose (lossy)"


def test_a_lossy_verifier_is_named_with_every_output(run: Run, folder: Path, tmp_path: Path) -> None:
    args = ("generate", "-m", folder, "-n", 24, *LOSSY)
    one = run(*args, "-p", PROMPT)
    assert one.exit_code == 0 and NAME in one.stderr
    found = json.loads(run(*args, "-p", PROMPT, "--json").stdout)
    assert found["verifier"] == NAME and found["stats"]["lossy"] is True
    file = tmp_path / "prompts.jsonl"
    file.write_text('"aba"\n"bab"\n', "utf-8")
    many = run(*args, "-f", file)
    assert many.exit_code == 0 and NAME in many.stderr
    chat = run("chat", "-m", folder, "-n", 8, *LOSSY, stdin="aaaa\n")
    assert chat.exit_code == 0 and NAME in chat.stderr
    demo = run("demo", "-m", folder, "-n", 24, "-p", PROMPT, *LOSSY)
    assert demo.exit_code == 0 and "equal: no" in demo.stdout
    assert f"the verifier {NAME} changes the distribution" in " ".join(demo.stdout.split())


def test_an_exact_verifier_is_not_called_lossy(run: Run, folder: Path) -> None:
    for verifier in ("match", "rejection"):
        args = (
            "generate",
            "-m",
            folder,
            "-p",
            PROMPT,
            "-n",
            8,
            "-d",
            "prompt_lookup",
            "--verifier",
            verifier,
        )
        assert "lossy" not in run(*args).stderr
        found = json.loads(run(*args, "--json").stdout)
        assert found["verifier"] == verifier and found["stats"]["lossy"] is False
        compared = json.loads(run(*args, "--compare", "--repeats", 1, "--json").stdout)
        assert compared["equal"] and not compared["lossy"]


def test_a_model_that_is_not_exact_is_named_with_every_output(run: Run, folder: Path, tmp_path: Path) -> None:
    args = ("generate", "-m", folder, "-n", 8, "--dtype", "bfloat16", "--stock", "-d", "prompt_lookup")
    reason = "not exact, near-ties may flip: stock=True runs the model's own modules"
    told = lambda result: reason in " ".join(result.stderr.split())  # noqa: E731
    one = run(*args, "-p", PROMPT)
    assert one.exit_code == 0 and told(one)
    found = json.loads(run(*args, "-p", PROMPT, "--json").stdout)["stats"]
    assert found["promise"] == "not exact" and found["why_inexact"].startswith("stock=True runs")
    file = tmp_path / "prompts.jsonl"
    file.write_text('"aba"\n"bab"\n', "utf-8")
    assert told(run(*args, "-f", file))
    assert told(run("chat", *args[1:], stdin="aaaa\n"))
    compared = json.loads(run(*args, "-p", PROMPT, "--compare", "--repeats", 1, "--json").stdout)
    assert compared["promise"] == "not exact" and not compared["equality_promised"]
    sampled = (*args, "-t", 1, "--verifier", "rejection", "-p", PROMPT)
    assert "near-ties" not in run(*sampled).stderr  # it promises no tokens
    assert json.loads(run(*sampled, "--json").stdout)["stats"]["promise"] is None
    exact = ("generate", "-m", folder, "-n", 8, "-p", PROMPT, "--dtype", "float32", "--stock")
    assert "near-ties" not in run(*exact).stderr  # so rare that a field of the statistics suffices
    stats = json.loads(run(*exact, "--json").stdout)["stats"]
    assert stats["promise"] == "same tokens but for near-ties" and stats["why_inexact"]


def test_compare_does_not_fail_under_a_lossy_verifier(run: Run, folder: Path) -> None:
    args = ("generate", "-m", folder, "-p", PROMPT, "-n", 24, "--compare", "--repeats", 1, *LOSSY)
    result = run(*args)
    assert result.exit_code == 0
    assert f"the verifier {NAME} changes the distribution" in " ".join(result.stdout.split())
    found = json.loads(run(*args, "--json").stdout)
    assert found["lossy"] and not found["equality_promised"] and not found["equal"]


# -- demo ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["lookahead", "none"])
def test_demo_in_a_pipe(run: Run, folder: Path, drafter: str) -> None:
    result = run("demo", "-m", folder, "-n", 24, "-p", PROMPT, "--drafter", drafter)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.startswith("equal: yes, 24 tokens in ") and " instead of 24" in last
    assert result.stdout.count("tokens/s") == 2 and " 24 steps" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80


def test_demo_on_the_embedded_model_by_default(
    run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr("outpace.names.nano_path", lambda: folder)
    result = run("demo", "--once", "--prompt", "ab", "-n", 4)
    assert result.exit_code == 0 and result.stdout.startswith("tiny, float32 on cpu")


def test_demo_refuses_an_empty_prompt(run: Run) -> None:
    refused(run("demo", "--prompt", ""), "the prompt is empty")


# -- chat ------------------------------------------------------------------------------------------------


def test_chat_over_a_pipe(run: Run, folder: Path) -> None:
    result = run("chat", "-m", folder, "-n", 6, stdin="hi\n\n/reset\nhi\n/nonsense\n/exit\nnever\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("tokens per step") == 2
    assert "conversation is forgotten" in result.stderr
    assert "no command /nonsense" in result.stderr
    answers = result.stdout.removesuffix("\n")
    assert len(answers) % 2 == 1 and answers[: len(answers) // 2] == answers[len(answers) // 2 + 1 :]


def test_chat_goes_on_after_a_message_that_does_not_fit(run: Run, folder: Path) -> None:
    result = run("chat", "-m", folder, "-n", 6, stdin="x" * 200 + "\nhi\n")
    assert result.exit_code == 0
    assert "does not fit" in result.stderr and result.stderr.count("tokens per step") == 1


# -- mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", "x", "--drafter", "lokahead"], "Did you mean 'lookahead'?"),
        (["-p", "x", "--drafter", "lookahead:windw=3"], "lookahead has no option 'windw'"),
        (["-p", "x", "--drafter", "lookahead:window=three"], "'three'"),
        (["-p", "x", "--drafter", "lookahead:window=-1"], "window must be at least 0"),
        (["-p", "x", "--verifier", "guess"], "no verifier 'guess'"),
        (["-p", "x", "--nonsense"], "No such option"),
        (["-p", "x", "--top-k", "many"], "Invalid value for '--top-k'"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "x", "--file", "y"], "give --prompt or --file, not both"),
        (["--file", "no-such-file.txt"], "cannot read no-such-file.txt"),
        (["-p", "x", "--max-new-tokens", "-1"], "--max-new-tokens must be at least 0, not -1"),
        (["-p", "x", "--temperature", "nan"], "--temperature must be between 0 and 1e+30, not nan"),
        (["-p", "x", "--temperature", "inf"], "--temperature must be"),
        (["-p", "x", "--top-p", "0"], "--top-p must be above 0"),
        (["-p", "x", "--top-p", "0.9"], "--top-p has no effect at temperature 0"),
        (["-p", "x", "--top-k", "5"], "--top-k has no effect at temperature 0"),
        (["-p", "x", "--min-p", "0.1"], "--min-p has no effect at temperature 0"),
        (["-p", "x", "--seed", "-1"], "--seed must be"),
        (["-p", "x", "--stop", ""], "--stop must be"),
        (["-p", "x", "--batch", "0"], "Invalid value for '--batch'"),
        (["-p", "x", "--compare", "--batch", "2"], "leave --batch out"),
        (["-p", "x", "--compare", "--json", "--logprobs", "1"], "leave one of them out"),
        (["-p", "x", "--model", "./no/such/folder"], "no such folder: ./no/such/folder"),
        (["-p", "x", "--model", "nobody/no-such-model"], "outpace pull nobody/no-such-model"),
        (["-p", "x", "--model", "no such name"], "no such folder: no such name"),
        (["-p", "x", "--model", ""], "the model's name is empty"),
        (["-p", "x", "--device", "toaster"], "device 'toaster' cannot be used"),
        (["-p", "x", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["-p", "x", "--out", "no/such/folder/out.json"], "cannot write no/such/folder/out.json"),
    ],
)
def test_a_mistake_gets_a_message(run: Run, args: list[str], message: str) -> None:
    refused(run("generate", *args), message)


def test_no_prompt_from_an_empty_pipe(run: Run) -> None:
    refused(run("generate", stdin=""), "the prompt is empty")


def test_a_prompt_longer_than_the_context(run: Run, folder: Path, tmp_path: Path) -> None:
    args = ("generate", "-m", folder, "-n", 4)
    refused(run(*args, "-p", "x" * 200), f"the prompt has 200 tokens, the model's context {CONTEXT}")
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fits"\n\n' + json.dumps("x" * 200), "utf-8")
    refused(run(*args, "-f", file), "line 3: the prompt has 200 tokens")


def test_chat_template_that_is_not_there(run: Run, folder: Path) -> None:
    refused(run("generate", "-m", folder, "-p", "x", "--chat"), "has no chat template")


@pytest.mark.parametrize("command", [("generate",), ("demo", "--once")])
def test_a_prompt_that_is_no_text_is_refused(run: Run, folder: Path, command: tuple[str, ...]) -> None:
    """A shell passes on any bytes; those that are not UTF-8 arrive as unpaired surrogates."""
    refused(run(*command, "-m", folder, "-p", "a\udcffb"), r"'\udcff' is an unpaired surrogate")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "not JSON"),
        (r'{"prompt": "a \ud800 b"}', r"'\ud800' is an unpaired surrogate"),
        ('{"text": "x"}', 'no "prompt", "question", "turns"'),
        ('{"turns": []}', '"turns" is empty'),
        ('{"tokens": [1, 2]}', 'only `outpace bench` takes "tokens"'),
        ("17", "neither a string nor an object"),
        ('{"prompt": ""}', 'no "prompt"'),
    ],
)
def test_a_bad_line_is_named_before_anything_is_decoded(
    run: Run, tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"good"\n{line}\n', "utf-8")
    result = run("generate", "-m", "./not-even-looked-at", "--file", file)
    assert f"line 2: {message}" in " ".join(result.stderr.split())
    refused(result, message)


def test_files_that_are_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    refused(run("generate", "--file", tmp_path / "latin.txt"), "is not UTF-8 text")
    refused(run("generate", "--file", tmp_path), "is a folder; give a file")
    (tmp_path / "none.jsonl").write_text("\n\n", "utf-8")
    refused(run("generate", "--file", tmp_path / "none.jsonl"), "contains no prompt")


def test_families_that_cannot_be_verified(run: Run, folder: Path, tmp_path: Path) -> None:
    rwkv = tmp_path / "rwkv"
    config = RwkvConfig(vocab_size=257, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2)
    RwkvForCausalLM(config).save_pretrained(rwkv)
    AutoTokenizer.from_pretrained(folder).save_pretrained(rwkv)
    refused(run("generate", "-m", rwkv, "-p", "x"), "RwkvForCausalLM (rwkv)")
    # transformers has a decoder of BART's to load alone, and none of T5's.
    for known in (T5Config(), BartConfig()):
        known.save_pretrained(tmp_path / "both")
        result = run("chat", "-m", tmp_path / "both")
        refused(result, f"({known.model_type}) is an encoder-decoder model")
        assert "outpace.accelerate(model, drafter)" in " ".join(result.stderr.split())


# -- Ctrl-C ----------------------------------------------------------------------------------------------


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Ctrl-C in the middle of these steps of the process."""
    step = Engine.step

    def arrange(*numbers: int) -> None:
        count = 0

        def pressed(self: Engine) -> Any:
            nonlocal count
            count += 1
            if count in numbers:
                signal.raise_signal(signal.SIGINT)
            return step(self)

        monkeypatch.setattr(Engine, "step", pressed)

    return arrange


def test_ctrl_c_keeps_what_was_produced(
    run: Run, folder: Path, expected: list[int], press: Callable[..., None]
) -> None:
    press(5)
    result = run("generate", "-m", folder, "-p", PROMPT, "-n", 24, "-d", "none")
    assert result.exit_code == 130
    assert result.stdout == AutoTokenizer.from_pretrained(folder).decode(expected[:5]) + "\n"
    assert "interrupted" in result.stderr and "Traceback" not in result.output


def test_ctrl_c_in_json_says_so(
    run: Run, folder: Path, expected: list[int], press: Callable[..., None]
) -> None:
    press(5)
    result = run("generate", "-m", folder, "-p", PROMPT, "-n", 24, "-d", "none", "--json")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert (found["finish_reason"], found["tokens"]) == ("interrupted", expected[:5])


def test_ctrl_c_leaves_the_finished_lines(
    run: Run, folder: Path, tmp_path: Path, press: Callable[..., None]
) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('"a"\n"b"\n"c"\n', "utf-8")
    press(10)
    result = run("generate", "-m", folder, "-f", file, "-n", 4, "-d", "none", "--json", "-o", out)
    assert result.exit_code == 130
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [one["prompt"] for one in found] == ["a", "b"]
    assert all(one["stats"]["tokens"] == 4 for one in found)


@pytest.mark.parametrize("args", [["demo", "-p", "ab"], ["generate", "-p", "ab", "--compare"]])
def test_ctrl_c_anywhere_else(run: Run, folder: Path, args: list[str], press: Callable[..., None]) -> None:
    press(30)
    result = run(*args, "-m", folder, "-n", 24)
    assert result.exit_code == 130 and "Traceback" not in result.output
    assert result.stderr.endswith("interrupted\n")


def test_the_second_ctrl_c_does_not_wait(run: Run, folder: Path, press: Callable[..., None]) -> None:
    press(2)
    before = signal.getsignal(signal.SIGINT)

    def impatient(self: Engine) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", impatient)
        result = run("generate", "-m", folder, "-p", "ab")
    assert result.exit_code == 130 and "Traceback" not in result.output
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_chat_stops_the_answer_only(run: Run, folder: Path, press: Callable[..., None]) -> None:
    press(3)
    result = run("chat", "-m", folder, "-d", "none", "-n", 8, stdin="hi\nho\n")
    assert result.exit_code == 0
    assert result.stderr.count("(interrupted; ") == 1 and result.stderr.count("tokens per step") == 2


# -- the process -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_crash(folder: Path) -> None:
    code = "import sys; sys.argv[0] = 'outpace'; from outpace.cli import main; main()"
    args = ["generate", "-m", str(folder), "-p", PROMPT, "-n", "80", "--ignore-eos"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert "Traceback" not in errors and "Exception" not in errors


_PRESSED = """
import atexit, os, signal, sys
from importlib.abc import MetaPathFinder

first, sys.argv = sys.argv[1], ["outpace", *sys.argv[2:]]

class Press(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == first:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

def second():
    os.write(2, b"the second")
    signal.raise_signal(signal.SIGINT)
    os.write(2, b"ignored")

sys.meta_path.insert(0, Press())
from outpace.__main__ import main
atexit.register(second)
main()
"""


@pytest.mark.parametrize("where", first(2, ["outpace.cli", "torch", "typer", "outpace.cli.generate"]))
def test_ctrl_c_twice_prints_no_traceback(folder: Path, where: str) -> None:
    """The first comes while a module is imported, the second while the process ends."""
    args = ["generate", "-m", str(folder), "-p", PROMPT, "-n", "4"]
    result = subprocess.run(
        [sys.executable, "-c", _PRESSED, where, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 130
    assert result.stderr.endswith("the second")
    assert "Traceback" not in result.stderr and "Exception" not in result.stderr


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, {"GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_that_wait_spin_for_a_short_time_unless_told(
    given: dict[str, str], kept: dict[str, str]
) -> None:
    ours = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    script = (
        "import outpace.cli, os, sys; from outpace.__main__ import main\n"
        "outpace.cli.main = lambda: print('torch' in sys.modules, "
        f"{{name: os.environ[name] for name in {ours} & os.environ.keys()}})\n"
        "main()"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ours} | given
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == f"False {kept}\n", done.stderr

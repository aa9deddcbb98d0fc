"""An unsupported model is refused in one line, by its config alone: the folders here have no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typer.testing import CliRunner

import outpace
from outpace.cli.app import app
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.inputs.unloaded import KNOWN, refuse_unloaded
from zoo.recurrent_families import REFUSED

# Type of a family -> words of the reason: by its class, by an entry of its config, by its arguments, by name.
FAMILIES = {
    "rwkv": "keeps a recurrent state by functions",
    "recurrent_gemma": "limits its attention by attention_window_size",
    "openai-gpt": "takes no .*, so a draft cannot follow",
    "moshi": "has a window other than its config's",
    "glm5_next": "has layers that keep more than keys and values",
    "moonshine": "reads input_values",
    "evolla": "takes no .*, so a draft cannot follow",
    "diffusion_gemma": "fills in the tokens of a block in any order",
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    return tmp_path


def test_the_library_refuses_it(family: str, folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"\({family}\) {FAMILIES[family]}") as caught:
        outpace.load(str(folder))
    assert "\n" not in str(caught.value)
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return  # no draft model, whatever it is
    with pytest.raises(OutpaceError, match=rf"draft_model: .*\({family}\) {FAMILIES[family]}"):
        outpace.Engine(outpace.load().target, f"draft_model:model={folder}")


@pytest.mark.parametrize("command", ["generate -p x -m", "serve --port 0 -m"])
def test_the_commands_refuse_it(family: str, folder: Path, command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), str(folder)])
    words = " ".join(done.stderr.split())
    assert done.exit_code == 2 and f"({family})" in words and "Traceback" not in words
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_once_it_is_loaded_is_refused_before(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name}.*{REFUSED[name][1]}"):
        refuse_unloaded(AutoModelForCausalLM, REFUSED[name][0]._config())


def test_reasons_by_name_are_of_families_that_exist() -> None:
    assert all(name in CONFIG_MAPPING for name in KNOWN)

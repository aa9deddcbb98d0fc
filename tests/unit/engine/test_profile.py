"""Profiles: written, kept beside others, read for their model, dtype and machine."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from models import tiny_llama
from outpace.core import OutpaceError
from outpace.engine.profile import (
    Profile,
    key_of,
    load_costs,
    load_profile,
    read_profiles,
    save_costs,
    save_profile,
)
from outpace.targets import Target

tomlkit = pytest.importorskip("tomlkit")

PROFILE = Profile(
    drafter="lookahead:window=3,ngram=3,guesses=3",
    objective="throughput",
    batch=4,
    tokens_per_second=12.5,
    speedup=1.25,
    mean_accepted_length=1.5,
    prompts=16,
    suite="builtin",
    outpace="0.1.0",
    costs={"verify": {"1": [[1.0, 0.01], [8.0, 0.02]]}},
)


def target_of(name: str = "", dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_llama(dtype=dtype)
    model.config._name_or_path = model.name_or_path = name
    return Target(model)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    target = target_of("/somewhere/tiny")
    path = tmp_path / "profile.toml"
    save_profile(path, target, PROFILE)
    assert load_profile(path, target) == PROFILE
    # The name counts, not the folder it lies in.
    assert load_profile(path, target_of("/elsewhere/tiny")) == PROFILE
    plain = tomlkit.parse(path.read_text())
    assert plain["profiles"][key_of(target)] == asdict(PROFILE)
    assert list(tmp_path.iterdir()) == [path]


def test_profiles_of_other_models_dtypes_and_machines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    first, other, wide = target_of("tiny"), target_of("other"), target_of("tiny", torch.float64)
    for batch, target in enumerate((first, other, wide), start=1):
        save_profile(path, target, replace(PROFILE, batch=batch))
    save_profile(path, other, replace(PROFILE, batch=7))
    assert [load_profile(path, target).batch for target in (first, other, wide)] == [1, 7, 3]
    assert len(read_profiles(path)) == 3


def test_another_model_dtype_or_machine_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.toml"
    target = target_of("tiny")
    save_profile(path, target, PROFILE)
    for stranger in (target_of("other"), target_of("tiny", torch.float64)):
        with pytest.raises(
            OutpaceError, match=r"has no profile of .*, but of: 'tiny, Llama.* run `outpace tune` here"
        ):
            load_profile(path, stranger)
    monkeypatch.setattr("outpace.targets.hardware.processor", lambda: "abacus 2000")
    with pytest.raises(OutpaceError, match=r"has no profile of 'tiny, .*, cpu, abacus 2000, .*\d+ threads'"):
        load_profile(path, target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no = toml = at all", "is not a valid profile"),
        ('title = "another file"', "a TOML file without profiles"),
        ('format = "outpace-profile"\nversion = 1', "version 1 of profiles, not 2"),
        ('format = "outpace-profile"\nversion = 2', "has no table of profiles"),
        ('format = "outpace-profile"\nversion = 2\nprofiles = {a = 1}', "has no table of profiles"),
        (
            'format = "outpace-profile"\nversion = 2\n[profiles]\n"KEY" = {drafter = "none"}',
            "broken profile .*missing",
        ),
        (
            'format = "outpace-profile"\nversion = 2\n[profiles]\n"KEY" = {costs = {}}',
            "but no drafter; `outpace tune",
        ),
        ('format = "outpace-profile"\nversion = 2\n[profiles]\n"KEY" = {DRAFTER}', "no drafter 'magic'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.toml"
    target = target_of("tiny")
    values = {**asdict(PROFILE), "drafter": "magic"}
    del values["costs"]  # a table in a line
    inline = ", ".join(f"{name} = {value!r}".replace("'", '"') for name, value in values.items())
    path.write_text(text.replace("KEY", key_of(target)).replace("DRAFTER", inline))
    with pytest.raises(OutpaceError, match=message):
        load_profile(path, target)


def test_costs_are_part_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    target, other = target_of("tiny"), target_of("other")
    with pytest.raises(OutpaceError, match="there is no profile at"):
        load_costs(path, target)
    save_costs(path, target, {"verify": {"1": [[1.0, 0.5]]}, "draft, a": {}})
    with pytest.raises(OutpaceError, match=r"has costs of 'tiny, .*but no drafter"):
        load_profile(path, target)
    with pytest.raises(OutpaceError, match=r"no costs of 'other, .*, but profiles of: 'tiny, "):
        load_costs(path, other)
    save_profile(path, other, PROFILE)
    save_costs(path, other, {"draft, b": {"1": [[4.0, 0.1]]}})
    save_profile(path, target, PROFILE)
    # Each keeps what the others wrote.
    assert load_costs(path, target) == {**PROFILE.costs, "draft, a": {}}
    assert load_profile(path, other).costs == {**PROFILE.costs, "draft, b": {"1": [[4.0, 0.1]]}}
    assert list(tmp_path.iterdir()) == [path]


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match=r"there is no profile at .*none.toml; `outpace tune --out"):
        load_profile(tmp_path / "none.toml", target_of())
    with pytest.raises(OutpaceError, match="cannot write"):
        save_profile(tmp_path / "nowhere" / "profile.toml", target_of(), PROFILE)


def test_accelerate_reads_it(tmp_path: Path) -> None:
    model = tiny_llama(dtype=torch.float32)
    path = tmp_path / "profile.toml"
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    with pytest.raises(OutpaceError, match="there is no profile at"):
        outpace.accelerate(model, profile=path)
    save_profile(path, Target(model), PROFILE)
    outpace.accelerate(model, profile=str(path))
    engines = vars(model)["generate"]._engines
    assert engines.drafter == PROFILE.drafter
    with engines.lend(engines.target(model)) as engine:  # what was tuned, the governor begins with
        assert engine.governor.forwards.seconds(1, 8) == 0.02
    assert model.generate(ids, max_new_tokens=20, do_sample=False).equal(plain)
    with pytest.raises(OutpaceError, match="give a drafter or a profile, not both"):
        outpace.accelerate(model, "lookahead", profile=path)
    assert vars(outpace.accelerate(model))["generate"]._engines.drafter is None  # the usual one

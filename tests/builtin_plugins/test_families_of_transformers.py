"""docs/reference/model-families.md agrees with a run of its data file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import transformers
from support.families.data import read_data
from support.families.survey import (
    NATIVE,
    NOT_COMPARED,
    REFUSED,
    REFUSED_LATE,
    THROUGH,
    architectures,
    survey,
)
from support.processes import ROOT

DATA = read_data()
FAMILIES = {family.name: family for family in DATA.families}
GATE = (
    *("OPTForCausalLM", "DeepseekV2ForCausalLM", "GraniteMoeForCausalLM"),
    *("BartForCausalLM", "BertLMHeadModel", "DeepseekV32ForCausalLM", "DogeForCausalLM"),
    *("JambaForCausalLM", "MambaForCausalLM", "Gemma4AssistantForCausalLM"),
    *("HrmTextForCausalLM", "Llama4ForCausalLM"),
)
SAME = transformers.__version__ == DATA.transformers


def test_nothing_gives_other_numbers():
    paths = {NATIVE, THROUGH, REFUSED, REFUSED_LATE, NOT_COMPARED}
    assert {family.name for family in DATA.families if family.path not in paths} == set()
    assert all(family.other != "differs" for family in DATA.families)


@pytest.mark.skipif(not SAME, reason=f"the data file is of transformers {DATA.transformers}")
def test_every_family_is_in_the_data_file():
    assert list(FAMILIES) == architectures()


def test_what_runs_natively_has_a_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project["entry-points"]["hardpoint.models"].keys()
    native = {family.name for family in DATA.families if family.path == NATIVE}
    assert native == {name for name in known if name in FAMILIES}


@pytest.mark.skipif(not SAME, reason=f"the data file is of transformers {DATA.transformers}")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in GATE else [pytest.mark.nightly]) for n in FAMILIES],
)
def test_a_run_finds_what_is_in_the_data_file(name: str, tmp_path: Path) -> None:
    assert survey(name, tmp_path) == FAMILIES[name]

"""docs/models.md lists the architectures that there are, and where each is compared."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from support.processes import ROOT

from hardpoint.builtin_plugins.loaders.gguf_architectures import ARCHITECTURES, architecture_of

ROW = re.compile(r"^\| .* \| (\w+)ForCausalLM \| `([\w-]+)` \| `(\w+\.py)` \|$", re.MULTILINE)
VECTOR_ROW = re.compile(r"^\| .* \| (\w+) \| `(\w+\.py)` \|$", re.MULTILINE)
PAGE = (ROOT / "docs/models.md").read_text()
ROWS = ROW.findall(PAGE)
VECTOR_ROWS = VECTOR_ROW.findall(PAGE)


def test_every_architecture_has_a_row():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {f"{family}ForCausalLM" for family, _, _ in ROWS} | {name for name, _ in VECTOR_ROWS}
    known = project["entry-points"]["hardpoint.models"].keys()
    images = {name for name in known if name.endswith("ForConditionalGeneration")}
    assert all(f"| {name} |" in PAGE for name in images)
    assert names == {name for name in known - images if not name.startswith("transformers")}
    assert len(ROWS) + len(VECTOR_ROWS) == len(names)


def test_the_names_in_gguf_files_are_those_of_the_loader():
    for family, name, _ in ROWS:
        architecture = f"{family}ForCausalLM"
        found = architecture_of(
            name, family == "Mixtral", family in ("Mistral", "Olmo3"), family == "DeepseekV3"
        ).name
        assert found == architecture
    assert {name for _, name, _ in ROWS} == ARCHITECTURES.keys()


def test_every_architecture_is_compared_with_transformers_as_on_the_page():
    for family, _, file in ROWS:
        source = (Path(__file__).parent / file).read_text()
        assert re.search(rf'": \(\s*"?{family}"?,', source), f"{file} has no variant of {family}"
        assert re.search(r"transformers[.,].*ForCausalLM", source)


def test_every_model_for_vectors_is_compared_as_on_the_page():
    for name, file in VECTOR_ROWS:
        source = (ROOT / "tests/builtin_plugins/step_parts/pooling" / file).read_text()
        family = name.removesuffix("Model").removesuffix("ForSequenceClassification")
        if file in ("test_encoders.py", "test_classifiers.py"):
            assert "FAMILIES)" in source or "for family in FAMILIES" in source
            source = (ROOT / "tests/support/encoders.py").read_text()
        if file == "test_decoder_classifiers.py":
            assert '"family", DECODERS' in source
            source = (ROOT / "tests/support/pairs.py").read_text()
        assert re.search(rf'"{family}"', source), f"{file} has no {family}"
        assert re.search(r"transformers, |import transformers|sentence_transformers", source)

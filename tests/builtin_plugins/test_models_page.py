"""docs/models.md lists the architectures, and tests compare each with transformers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from support.processes import ROOT

from hardpoint.builtin_plugins.loaders.gguf_architectures import ARCHITECTURES, architecture_of

ROW = re.compile(r"^\| .* \| (\w+)ForCausalLM \| `([\w-]+)` \|$", re.MULTILINE)
VECTOR_MODEL = re.compile(r"\| (\w+(?:Model|ForSequenceClassification)) (?=\|)")
PAGE = (ROOT / "docs/models.md").read_text()
ROWS = ROW.findall(PAGE)
VECTOR_MODELS = VECTOR_MODEL.findall(PAGE)
COMPARISONS = (
    *("test_models.py", "test_models_gemma.py", "test_model_families.py"),
    *("test_mixtures.py", "test_qwen3_5.py"),
)
"""Files of tests that compare models with transformers."""


def test_every_architecture_has_a_row():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {f"{family}ForCausalLM" for family, _ in ROWS} | {*VECTOR_MODELS}
    models = project["entry-points"]["hardpoint.models"]
    known = {name for name, target in models.items() if ".models.heads." not in target}
    images = {name for name in known if name.endswith("ForConditionalGeneration")}
    assert all(f"| {name} |" in PAGE for name in images)
    assert names == {name for name in known - images if not name.startswith("transformers")}
    assert len(ROWS) + len(VECTOR_MODELS) == len(names)


def test_the_names_in_gguf_files_are_those_of_the_loader():
    for family, name in ROWS:
        architecture = f"{family}ForCausalLM"
        found = architecture_of(
            name, family == "Mixtral", family in ("Mistral", "Olmo3"), family == "DeepseekV3"
        ).name
        assert found == architecture
    assert {name for _, name in ROWS} == ARCHITECTURES.keys()


def test_every_architecture_is_compared_with_transformers():
    folder = Path(__file__).parent
    sources = {file: (folder / file).read_text() for file in COMPARISONS}
    for file, source in sources.items():
        assert re.search(r"transformers[.,].*ForCausalLM", source), file
    for family, _ in ROWS:
        variant = re.compile(rf'": \(\s*"?{family}"?,')
        assert any(map(variant.search, sources.values())), f"no variant of {family}"


def test_every_model_for_vectors_is_compared():
    folder = ROOT / "tests/builtin_plugins/step_parts/pooling"
    support = ROOT / "tests/support"
    decoders = (folder / "test_sentence_transformers.py").read_text()
    for file in ("test_encoders.py", "test_classifiers.py"):
        source = (folder / file).read_text()
        assert "FAMILIES)" in source or "for family in FAMILIES" in source
    classifiers = (folder / "test_decoder_classifiers.py").read_text()
    assert '"family", DECODERS' in classifiers
    encoders = (support / "encoders.py").read_text()
    decoder_classifiers = (support / "pairs.py").read_text()
    for source in (decoders, encoders, decoder_classifiers):
        assert re.search(r"transformers, |import transformers|sentence_transformers", source)
    for name in VECTOR_MODELS:
        family = name.removesuffix("Model").removesuffix("ForSequenceClassification")
        is_encoder = f'"{family}"' in encoders
        is_decoder = f'"{family}"' in (decoders if name.endswith("Model") else decoder_classifiers)
        assert is_encoder or is_decoder, name

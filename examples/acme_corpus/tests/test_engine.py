"""An engine drafts from documents: the same tokens in fewer steps; errors name the option."""

import pytest

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

TERMS = "Goods are returned within thirty days, in the state in which they came."
SAYS = "As we say: Goods are returned within thirty days, in the state in which they came. Bye"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "terms").mkdir()
    (tmp_path / "terms" / "goods.txt").write_text(f"1. {TERMS}\n2. That is all.\n")
    return write_scripted_model(tmp_path, {"may I?": SAYS})


def config(folder, **options):
    table = {"tokenizer": str(folder / "tokenizer.json"), **options}
    table.setdefault("documents", [str(folder / "terms" / "**" / "*.txt")])
    speculation = {"use": ["corpus"], "adaptive": False}
    return scripted_config(folder, {"speculation": speculation, "plugin": {"corpus": table}})


def test_a_quotation_takes_fewer_steps(folder):
    params = SamplingParams(temperature=0.0, max_tokens=100)
    with LLM(config=config(folder)) as llm:
        (output,) = llm.generate(["may I?"], params)
        stats = llm.engines.scheduler_stats()
    assert output.outputs[0].text == SAYS
    assert stats.num_accepted_drafts > 0.6 * len(TERMS)  # a token is a byte


ERRORS = {
    r"plugin.corpus.documents: 'none.txt' matches no file": {"documents": ["none.txt"]},
    r"documents: '.*goods.txt' goes beyond max_bytes \(10\)": {"max_bytes": 10},
    r"documents: 'latin.txt': .* invalid": {"documents": ["latin.txt"]},
    r"plugin.corpus.tokenizer: ": {"tokenizer": "nowhere.json"},
    r"expected shortest <= longest \(2\)": {"longest": 2},
}


@pytest.mark.parametrize(("message", "options"), ERRORS.items(), ids=ERRORS)
def test_what_cannot_be_read_is_refused(folder, monkeypatch, message, options):
    monkeypatch.chdir(folder)
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        LLM(config=config(folder, **options))


def test_the_tokenizer_of_another_model_is_refused(folder, tmp_path):
    other = write_scripted_model(tmp_path / "other", special_tokens=["<extra>"])
    (tmp_path / "terms" / "more.txt").write_text("<extra>")
    with pytest.raises(
        ConfigError, match="tokenizer: expected the model's tokenizer, with ids up to"
    ):
        LLM(config=config(folder, tokenizer=str(other / "tokenizer.json")))

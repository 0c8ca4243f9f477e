"""`draft_model`: the conformance suite over a scripted model, and real models that draft."""

from __future__ import annotations

import json

import pytest
from support.driving import FINAL
from support.parallel import write_random_model
from support.searching import kit_examples

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.speculators.draft_model import DraftModel
from hardpoint.plugins import ConfigError
from hardpoint.testing import SpeculatorSuite

LLAMA = "LlamaForCausalLM"


class TestDraftModel(SpeculatorSuite):
    speculator = DraftModel
    options = {"model": "scripted"}
    examples = kit_examples(0.2)
    budget_us_per_request = None  # it takes what the model takes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small model, a smaller one with the same vocabulary, and one with another."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "target": write_random_model(folder / "target", LLAMA),
        "other": write_random_model(folder / "other", LLAMA, num_hidden_layers=1),
        "foreign": write_random_model(folder / "foreign", LLAMA, vocab_size=77),
    }


def opened(folders, draft=None, *, engine=None, **options):
    config = {"model": str(folders["target"]), "max_model_len": 128, "device": "cpu"}
    config |= {"load": {"use": "dummy"}, "dtype": "float32"} | (engine or {})
    if draft is not None:
        config["speculation"] = {"use": ["draft_model"], "adaptive": False}
        config["plugin"] = {"draft_model": {"model": str(folders[draft]), **options}}
    return LLM(config=config)


JOBS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **FINAL),
    SamplingParams(temperature=0.7, seed=3, top_k=40, max_tokens=16, ignore_eos=True, **FINAL),
    SamplingParams(temperature=1.0, seed=4, top_p=0.8, n=2, max_tokens=12, **FINAL),
    SamplingParams(temperature=1.0, seed=5, min_p=0.1, max_tokens=9, ignore_eos=True, **FINAL),
]
PROMPTS = [[1, 2, 3], list(range(4, 40)), [9] * 11, [5]]


def generate(llm):
    outputs = llm.generate(PROMPTS, JOBS)
    stats = llm.engines.scheduler_stats()
    tokens = [[part.token_ids for part in output.outputs] for output in outputs]
    return tokens, stats.num_drafts, stats.num_accepted_drafts


@pytest.fixture(scope="module")
def expected(folders):
    with opened(folders) as llm:
        return generate(llm)[0]


def test_the_model_itself_drafts_each_token_right(folders, expected):
    with opened(folders, "target") as llm:
        tokens, drafts, accepted = generate(llm)
    assert tokens == expected
    assert drafts == accepted > 40


def test_another_model_changes_no_token(folders, expected):
    with opened(folders, "other") as llm:
        tokens, drafts, accepted = generate(llm)
        assert tokens == expected
        assert drafts > accepted
        llm.sleep(1)
        llm.wake_up()
        assert generate(llm)[0] == expected
        assert not llm.plugins.health().fallbacks


def test_without_room_there_are_no_drafts(folders, expected):
    with opened(folders, "target", cache_tokens=16) as llm:
        tokens, drafts, _ = generate(llm)
        assert tokens == expected
        assert 0 < drafts < 40
        assert not llm.plugins.health().fallbacks


def test_another_vocabulary_is_refused_before_weights_are_read(folders):
    message = (
        r"plugin.draft_model.model: .*foreign' has a vocabulary of 77 tokens, expected \d+, as "
        r".*target' has"
    )
    with pytest.raises(ConfigError, match=message):
        opened(folders, "foreign")


def with_tokenizer(folder, change):
    """Write a model with the same sizes and another tokenizer."""
    path = write_random_model(folder, LLAMA, num_hidden_layers=1) / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


def exchange(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def without_end(content):
    content["added_tokens"] = []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (exchange, "its token 64 is 'b', in .*target' it is 'a'"),
        (without_end, "its token 256 is none, in .*target' it is '.+'"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_tokenizer_is_refused_before_weights_are_read(
    folders, tmp_path, change, words, ranks
):
    draft = with_tokenizer(tmp_path / "draft", change)
    message = rf"plugin.draft_model.model: '.*draft' has another tokenizer: {words}"
    parallel = {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}} if ranks > 1 else {}
    with pytest.raises(ConfigError, match=message):
        opened(folders | {"draft": draft}, "draft", engine=parallel)


def test_without_a_tokenizer_the_sizes_alone_are_compared(folders, tmp_path, expected, caplog):
    draft = with_tokenizer(tmp_path / "draft", lambda content: None)
    (draft / "tokenizer.json").unlink()
    with opened(folders | {"draft": draft}, "draft") as llm:
        assert generate(llm)[0] == expected
    assert "the tokens of" in caplog.text


def test_the_tokenizer_of_the_configuration_is_compared(folders, tmp_path):
    """The tokenizer of the engine counts, not the tokenizer of its model's folder."""
    tokenizer = with_tokenizer(tmp_path / "tokenizer", exchange)
    engine = {"tokenizer": {"path": str(tokenizer)}}
    with pytest.raises(ConfigError, match="its token 64 is 'a', in .* it is 'b'"):
        opened(folders, "other", engine=engine)

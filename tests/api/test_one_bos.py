"""A prompt begins with one BOS: that of a chat template, or that of the tokenizer."""

from __future__ import annotations

import json

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

BOS = 257
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A model whose tokenizer and template both write BOS."""
    folder = write_scripted_model(
        tmp_path_factory.mktemp("bos"), special_tokens=("<s>",), max_position_embeddings=512
    )
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["bos_token"] = "<s>"
    settings["chat_template"] = "{{ bos_token }}" + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(config=scripted_config(folder)) as opened:
        yield opened


def prompts(llm):
    rendered = llm.model.apply_chat_template(MESSAGES)
    return {
        "plain text": "hi",
        "text of the template": rendered["prompt"],
        "mapping of a text": {"prompt": rendered["prompt"]},
        "mapping of the template": rendered,
        "token ids": list(rendered["prompt_token_ids"]),
    }


def test_every_form_of_a_prompt_has_one(llm):
    for form, prompt in prompts(llm).items():
        (output,) = llm.generate(prompt, GREEDY)
        ids = list(output.prompt_token_ids)
        assert (ids[0], ids.count(BOS)) == (BOS, 1), form


def test_a_conversation_has_the_ids_of_its_text(llm):
    (chat,) = llm.chat(MESSAGES, GREEDY)
    (given,) = llm.generate(llm.model.apply_chat_template(MESSAGES)["prompt"], GREEDY)
    assert list(chat.prompt_token_ids) == list(given.prompt_token_ids)


def test_one_inside_a_text_stays(llm):
    (output,) = llm.generate("a<s>b", GREEDY)
    ids = list(output.prompt_token_ids)
    assert (ids[0], ids.count(BOS)) == (BOS, 2)


def test_token_ids_are_taken_as_they_are(llm):
    (output,) = llm.generate([BOS, BOS, 65], GREEDY)
    assert list(output.prompt_token_ids) == [BOS, BOS, 65]

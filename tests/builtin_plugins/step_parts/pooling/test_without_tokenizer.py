"""An engine without a tokenizer: token ids in, vectors or token ids out."""

from __future__ import annotations

import numpy as np
import pytest
from support.encoders import PROMPTS, TABLE, write_encoder
from support.http_server import running

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

NONE = {"tokenizer": {"use": "none"}}
WHY = r'for the engine has no tokenizer \(tokenizer.use = "none"\)'


@pytest.fixture
def folder(tmp_path):
    """A folder without any file of a tokenizer."""
    folder = write_scripted_model(tmp_path / "model")
    for file in folder.glob("*token*"):
        file.unlink()
    assert not list(folder.glob("*chat*"))
    return folder


def test_an_encoder_makes_vectors_of_ids(tmp_path):
    write_encoder(tmp_path / "model", "Bert")
    config = TABLE | {"model": str(tmp_path / "model")}
    with LLM(config=config) as llm:
        expected = llm.embed(PROMPTS)
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    with LLM(config=config | NONE) as llm:
        for output, other in zip(llm.embed(PROMPTS), expected, strict=True):
            np.testing.assert_array_equal(output.outputs, other.outputs)
        with pytest.raises(RequestError, match=rf"^prompts\[1\]: prompt: .* ids, {WHY}, got a te"):
            llm.embed([[5, 6], "a text"])
        assert len(llm.embed([[5, 6]])) == 1


@pytest.mark.parametrize("in_process", [True, False])
def test_a_decoder_makes_ids_of_ids(folder, in_process):
    ids = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False)
    table = NONE | {"engine": {"in_process": in_process}}
    with LLM(config=scripted_config(folder, table)) as llm:
        (output,) = llm.generate([[5, 6, 7]], ids)
        assert len(output.outputs[0].token_ids) == 4
        assert output.outputs[0].text == ""
        for prompt, params, message in [
            ("a text", ids, f"^prompt: expected token ids, {WHY}, got a text"),
            ([5], SamplingParams(max_tokens=4), f"^detokenize: expected false, {WHY}, got true"),
        ]:
            with pytest.raises(RequestError, match=message):
                llm.generate(prompt, params)
        with pytest.raises(RequestError, match=f"^messages: expected a prompt of token ids, {WHY}"):
            llm.chat([{"role": "user", "content": "a text"}])
        likely = SamplingParams(max_tokens=1, detokenize=False, logprobs=2)
        (entries,) = llm.generate([5], likely)[0].outputs[0].logprobs
        assert {logprob.decoded_token for logprob in entries.values()} == {""}
        assert llm.generate([[5, 6, 7]], ids)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_a_folder_without_a_tokenizer_is_an_error_of_the_default_one(folder):
    from hardpoint import ModelError

    table = {"tokenizer": {"use": "transformers"}}
    with pytest.raises(ModelError, match="it has no tokenizer.json"):
        LLM(config=scripted_config(folder, table))


def test_over_http(folder):
    table = NONE | {"stats": {"sinks": []}, "server": {"port": 0, "access_log": "off"}}
    with running(AsyncLLM(config=scripted_config(folder, table))) as server:
        body = {"input": [[5, 6], [7]], "encoding_format": "float"}
        answer = server.post("/v1/embeddings", body).json()
        assert answer["usage"]["prompt_tokens"] == 3
        refused = server.post("/v1/embeddings", {"input": [[5, 6], "a text"]})
        assert refused.status_code == 400
        assert (
            "input[1]: expected token ids, for the engine has no tokeni"
            in refused.json()["error"]["message"]
        )

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.plugins import ConfigError
from hardpoint.testing import scripted_config, write_scripted_model

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def generate(folder: Path, **changes: object) -> tuple[list[int], int]:
    """Start an engine; return its tokens, and the number of prompt tokens not computed."""
    with LLM(str(folder), config=scripted_config(folder, changes)) as llm:
        (output,) = llm.generate([PROMPT], PARAMS)
        assert not llm.plugins.health().fallbacks
        return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_a_restarted_engine_goes_on_with_the_blocks_of_the_last_one(tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", seed=3, max_position_embeddings=1024)
    stores = {
        "kv_connector": {"stores": ["disk"]},
        "plugin": {"disk": {"path": str(tmp_path / "kv")}},
    }
    expected, _cached = generate(folder)
    assert generate(folder, **stores) == (expected, 0)
    tokens, cached = generate(folder, **stores)
    assert tokens == expected
    assert cached > 100


@pytest.mark.parametrize("options", [{}, {"path": "{link}"}, {"path": "/kv", "size_bytes": "1 GB"}])
def test_an_engine_names_the_option_that_is_wrong(
    tmp_path: Path, options: dict[str, object]
) -> None:
    folder = write_scripted_model(tmp_path / "model", seed=3, max_position_embeddings=1024)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    if options.get("path") == "{link}":
        options = {"path": str(link)}
    changes = {"kv_connector": {"stores": ["disk"]}, "plugin": {"disk": options}}
    wrong = "plugin.disk.size_bytes" if "size_bytes" in options else "plugin.disk.path"
    with pytest.raises(ConfigError, match=wrong):
        generate(folder, **changes)

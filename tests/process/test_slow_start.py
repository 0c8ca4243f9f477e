"""A program that takes longer than the start budget before its engine process is launched."""

import pytest

from hardpoint import LLM
from hardpoint.errors import EngineDeadError
from hardpoint.testing import scripted_config

SLOW = """
import time

from hardpoint.testing.scripted_tokenizer import ByteTokenizer


def download():
    time.sleep(1)  # five times the limit


class Slow(ByteTokenizer):
    contract = 1

    def __init__(self, context):
        download()
        super().__init__(context=context)
"""


def test_the_error_names_the_setting(scripted, tmp_path, monkeypatch):
    (tmp_path / "slow_to_build.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    config = scripted_config(
        scripted,
        {
            "engine": {"in_process": False, "start_timeout_seconds": 0.2},
            "tokenizer": {"use": "slow_to_build:Slow"},
        },
    )
    words = (
        r"the program took \d+ s to prepare the launch of the engine process, of 0.2 s for the "
        r"whole start \(engine\.start_timeout_seconds\); slow was .+\(\) in .+:\d+"
    )
    with pytest.raises(EngineDeadError, match=words):
        LLM(config=config)

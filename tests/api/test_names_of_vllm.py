"""Errors of unknown arguments that vLLM has, and getters of LLM under names of vLLM."""

from __future__ import annotations

import re

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.async_llm import AsyncLLM
from hardpoint.cli import main
from hardpoint.configuration.loading import config_from, default_config_type
from hardpoint.configuration.names_of_vllm import KEYS
from hardpoint.plugins import ConfigError
from hardpoint.testing import scripted_config
from hardpoint.typed.describing import type_at

ADVICE = "; vLLM's gpu_memory_utilization is kv_cache.memory_fraction in the configuration"


@pytest.mark.parametrize("key", sorted(set(KEYS.values())))
def test_the_keys_exist(key):
    assert type_at(default_config_type(), key.split(".")) is not None


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_an_argument_of_a_model(cls):
    message = f"{cls.__name__}() got an unexpected keyword argument 'gpu_memory_utilization'"
    with pytest.raises(TypeError, match=f"^{re.escape(message + ADVICE)}$"):
        cls("smollm2", gpu_memory_utilization=0.5)
    with pytest.raises(TypeError, match=r"'max_modl_len' \(did you mean 'max_model_len'\?\)$"):
        cls("smollm2", max_modl_len=9)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'$"):
        cls("smollm2", nothing=1)


def test_a_field_of_the_configuration():
    with pytest.raises(ConfigError) as error:
        config_from({"gpu_memory_utilization": 0.5})
    message = f"gpu_memory_utilization: unknown field{ADVICE} (from argument LLM(config=...))"
    assert str(error.value) == message


def test_an_option_of_the_command_line(capsys):
    assert main(["generate", "x", "--gpu-memory-utilization", "0.5"]) == 2
    advice = ADVICE.replace("gpu_memory_utilization", "gpu-memory-utilization")
    error = capsys.readouterr().err
    assert f"unrecognized option --gpu-memory-utilization{advice}\n" in error


def test_getters(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        assert llm.get_tokenizer() is llm.tokenizer
        assert isinstance(llm.get_default_sampling_params(), SamplingParams)
        assert llm.get_metrics() == llm.metrics()

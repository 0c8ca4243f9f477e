"""Short programs of vLLM's users run with `vllm` replaced by `hardpoint.vllm`."""

import re
from pathlib import Path

import pytest

from hardpoint.vllm import LLM, SamplingParams

TEXT = Path(__file__).with_name("snippets.txt").read_text()
_, *PARTS = re.split(r"^### (.*)\n", TEXT, flags=re.MULTILINE)
SNIPPETS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
IMPORT = re.compile(r"^(\s*)(from|import) vllm\b", re.MULTILINE)


@pytest.fixture(scope="module")
def llm():
    arguments = {"gpu_memory_utilization": 0.5, "tensor_parallel_size": 1, "enforce_eager": True}
    arguments |= {"dtype": "float32", "enable_sleep_mode": True, "trust_remote_code": True}
    with LLM(model="smollm2", max_model_len=512, max_num_seqs=16, seed=0, **arguments) as opened:
        yield opened


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs(llm, name):
    program = IMPORT.sub(r"\1\2 hardpoint.vllm", SNIPPETS[name])
    program = re.sub(
        r"^import hardpoint.vllm$", "import hardpoint.vllm as vllm", program, flags=re.MULTILINE
    )
    exec(compile(program, name, "exec"), {"llm": llm, "SamplingParams": SamplingParams})

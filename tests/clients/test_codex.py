"""The Codex CLI, through `/v1/responses`: an answer, and a command that the model calls."""

import os
import subprocess

import pytest
from support.delta_engine import DeltaEngine, call
from support.fake_engine import configured
from support.http_server import running

pytestmark = pytest.mark.nightly

MODEL = "gpt-5.5"  # Codex has the tools of a model that it knows
CONFIG = """
model = "{model}"
model_provider = "local"

[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


class _ScriptedTurns(DeltaEngine):
    """Answers each request with the deltas of the next turn."""

    turns = ()

    def _outputs(self, *arguments):
        self.deltas, *self.turns = self.turns
        yield from super()._outputs(*arguments)


@pytest.fixture
def codex(tmp_path, node_modules):
    """Runs `codex exec` with a prompt against the turns of a model; returns engine and output."""
    program = node_modules / ".bin" / "codex"
    if not program.exists():
        pytest.skip("needs @openai/codex of npm, which scripts/test --all installs")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()

    def run(prompt, *turns):
        engine = _ScriptedTurns(config=configured(served_names=[MODEL]))
        engine.turns = turns
        with running(engine) as server:
            text = CONFIG.format(model=MODEL, url=server.url)
            (home / "config.toml").write_text(text)
            done = subprocess.run(
                [
                    str(program),
                    "exec",
                    "--dangerously-bypass-approvals-and-sandbox",
                    "--skip-git-repo-check",
                    prompt,
                ],
                cwd=work,
                env={"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        return engine, done.stdout

    run.work = work
    return run


TEXT = ({"content": "All is well."}, {"finish_reason": "stop"})


def test_a_prompt_is_answered(codex):
    engine, output = codex("Say that all is well", TEXT)
    assert "All is well." in output
    messages, _, extras = engine.asked[-1]
    assert "Say that all is well" in str(messages)
    assert extras["tools"]


def test_a_command_of_the_model_runs_and_its_result_comes_back(codex):
    arguments = '{"cmd": "echo written > made.txt; cat made.txt"}'
    calls = (
        {"tool_calls": [call(0, "call_1", "exec_command", arguments)]},
        {"finish_reason": "tool_calls"},
    )
    engine, output = codex("Write a file", calls, TEXT)
    assert (codex.work / "made.txt").read_text() == "written\n"
    result = engine.asked[-1][0][-1]
    assert (result["role"], result["tool_call_id"]) == ("tool", "call_1")
    assert "written" in str(result["content"])
    assert "All is well." in output

"""Claude Code, through `/v1/messages`: an answer, and a command that the model calls."""

import json
import os
import subprocess

import pytest
from support.delta_engine import DeltaEngine, call
from support.fake_engine import configured
from support.http_server import running

pytestmark = pytest.mark.nightly

TEXT = ({"content": "All is well."}, {"finish_reason": "stop"})
COMMAND = {"command": "echo written > made.txt; cat made.txt", "description": "Write a file"}
CALL = (
    {"tool_calls": [call(0, "call_1", "Bash", json.dumps(COMMAND))]},
    {"finish_reason": "tool_calls"},
)


class _CallingEngine(DeltaEngine):
    """Calls Bash once per conversation if `calls_tools`, then answers with a text."""

    calls_tools = False

    def _outputs(self, *arguments):
        messages = self.asked[-1][0]
        has_result = any(message["role"] == "tool" for message in messages)
        self.deltas = CALL if self.calls_tools and not has_result else TEXT
        yield from super()._outputs(*arguments)


@pytest.fixture
def claude(tmp_path, node_modules):
    """A function that runs `claude -p` with a prompt and returns an engine and the result."""
    program = node_modules / ".bin" / "claude"
    if not program.exists():
        pytest.skip("needs @anthropic-ai/claude-code of npm, which scripts/test --all installs")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()

    def run(prompt, model, calls_tools=False):
        engine = _CallingEngine(config=configured(served_names=[model]))
        engine.calls_tools = calls_tools
        with running(engine) as server:
            command = [str(program), "-p", prompt, "--model", model]
            done = subprocess.run(
                [*command, "--allowedTools", "Bash", "--output-format", "json"],
                cwd=work,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(home),
                    "ANTHROPIC_BASE_URL": server.url,
                    "ANTHROPIC_AUTH_TOKEN": "none",
                    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                },
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        return engine, json.loads(done.stdout)

    run.work = work
    return run


@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "local-model"])
def test_a_prompt_is_answered(claude, model):
    """To a model that it does not know, it sends a last message of the role system."""
    engine, result = claude("Say that all is well", model)
    assert (result["result"], result["is_error"]) == ("All is well.", False)
    messages, _, extras = engine.asked[-1]
    assert "Say that all is well" in str(messages)
    assert extras["tools"]


def test_a_command_of_the_model_runs_and_its_result_comes_back(claude):
    engine, result = claude("Write a file", "local-model", calls_tools=True)
    assert (claude.work / "made.txt").read_text() == "written\n"
    (answer,) = [message for message in engine.asked[-1][0] if message["role"] == "tool"]
    assert answer["tool_call_id"] == "call_1"
    assert "written" in str(answer["content"])
    assert result["result"] == "All is well."

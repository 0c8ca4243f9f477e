"""The commands `generate`, `chat` and `config`."""

import argparse
import io
import json
import sys

import pytest

from hardpoint.builtin_plugins import commands as builtin_commands
from hardpoint.cli import main
from hardpoint.core.config import load_config
from hardpoint.plugins import (
    CommandContext,
    CompletionOutput,
    EngineConfig,
    Logprob,
    RequestError,
    RequestOutput,
    RequestOutputKind,
)
from hardpoint.registry.catalog import Catalog
from hardpoint.registry.plugin_set import resolve_plugins

pytestmark = pytest.mark.usefixtures("folder")


class FakeGenerator:
    """Says what it is told, a word at a time, and remembers what it was asked."""

    def __init__(self, answers):
        self.answers = list(answers)
        self.asked = []
        self.closed = False

    def stream(self, prompt, params=None):
        self.asked.append((prompt, params))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        outputs = [p if isinstance(p, RequestOutput) else delta(p) for p in answer]
        yield from outputs
        if not any(output.finished for output in outputs):
            yield delta("", "stop")

    def stream_chat(self, messages, params=None):
        return self.stream([dict(message) for message in messages], params)

    def close(self):
        self.closed = True


def delta(text, finish_reason=None, index=0, **fields):
    new = CompletionOutput(
        index=index,
        text=text,
        token_ids=[len(text)] if text else [],
        finish_reason=finish_reason,
        **fields,
    )
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1, 2],
        outputs=[new],
        finished=bool(finish_reason),
    )


def run_command(name, arguments, generator=None):
    """Run a built-in command with a fake model."""
    (command,) = [c for c in builtin_commands.cli_commands() if c.name == name]
    parser = argparse.ArgumentParser(prog=f"hardpoint {name}")
    command.configure(parser)
    context = CommandContext(
        load_config=lambda: load_config(environ={}),
        load_catalog=lambda config, sources: Catalog(
            resolve_plugins(config, sources), config, sources
        ),
        open_model=lambda config, config_sources: generator,
        version="9.9",
    )
    return command.run(parser.parse_args(arguments), context)


# hardpoint generate


def test_generate_streams_the_text_alone(capsys):
    generator = FakeGenerator([["one ", "two"]])
    assert run_command("generate", ["a prompt"], generator) == 0
    assert capsys.readouterr().out == "one two\n"
    ((prompt, params),) = generator.asked
    assert prompt == "a prompt"
    assert (params.temperature, params.max_tokens, params.top_p, params.seed) == (0, 256, 1, None)
    assert params.output_kind is RequestOutputKind.DELTA
    assert generator.closed


def test_generate_shows_each_piece_at_once(monkeypatch):
    seen = []

    class Output(io.StringIO):
        def flush(self):
            seen.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Output())
    run_command("generate", ["p"], FakeGenerator([["one ", "two"]]))
    assert seen == ["one ", "one two"]


def test_generate_passes_every_sampling_option():
    generator = FakeGenerator([[]])
    arguments = "p --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --max-tokens 7"
    arguments += " --stop a --stop b --n 2 --plugin-args dry.base=2 --plugin-args dry.name=x"
    run_command("generate", arguments.split(), generator)
    params = generator.asked[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.seed, params.max_tokens, params.stop, params.n) == (3, 7, ["a", "b"], 2)
    assert params.plugin_args == {"dry": {"base": 2, "name": "x"}}


def test_generate_prints_several_prompts_and_completions_apart(capsys):
    first = [delta("x"), delta("y", index=1), delta("z", index=1), delta("!")]
    run_command("generate", ["p", "q"], FakeGenerator([first, ["second"]]))
    assert capsys.readouterr().out == "x!\n\nyz\n\nsecond\n"


def test_generate_reads_a_prompt_from_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstdin"))
    generator = FakeGenerator([[], []])
    run_command("generate", ["-", "other"], generator)
    assert [prompt for prompt, _ in generator.asked] == ["from\nstdin", "other"]
    with pytest.raises(RequestError, match="can be read only once"):
        run_command("generate", ["-", "-"], generator)


def test_generate_through_the_chat_template():
    generator = FakeGenerator([[]])
    run_command("generate", ["hi", "--chat"], generator)
    assert generator.asked[0][0] == [{"role": "user", "content": "hi"}]


def test_generate_json_is_one_line_per_completion(capsys):
    logprobs = [{5: Logprob(logprob=-0.5, rank=1, decoded_token="abc")}]
    generator = FakeGenerator([[delta("abc", logprobs=logprobs), delta("é", index=1)], ["b"]])
    assert run_command("generate", ["p", "q", "--json", "--logprobs", "1"], generator) == 0
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "prompt": "p",
        "index": 0,
        "text": "abc",
        "token_ids": [3],
        "finish_reason": "stop",
        "stop_reason": None,
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
        "logprobs": [[{"token_id": 5, "token": "abc", "logprob": -0.5, "rank": 1}]],
    }
    assert (second["index"], second["text"]) == (1, "é")
    assert third["prompt"] == "q"


def test_generate_reports_a_failed_request_and_goes_on(capsys):
    failed = [delta("half"), delta("", "error", error="plugin 'dry' broke")]
    assert run_command("generate", ["p", "q"], FakeGenerator([failed, ["fine"]])) == 1
    captured = capsys.readouterr()
    assert captured.out == "half\n\nfine\n"
    assert captured.err == "hardpoint: error: plugin 'dry' broke\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature: expected a number >= 0"),
        (["--max-tokens", "0"], "max_tokens: expected a whole number >= 1"),
        (["--logprobs", "2"], "--logprobs: it is printed as JSON only; add --json"),
        (["--plugin-args", "dry"], "--plugin-args: expected PATH=VALUE such as mirostat.tau=5.0"),
        (["--plugin-args", "dry=1"], "--plugin-args: expected NAME.KEY=VALUE such as"),
        (
            ["--plugin-args", "a.b=1", "--plugin-args", "a.b.c=1"],
            "--plugin-args: a.b.c cannot be set, for b is 1",
        ),
    ],
)
def test_generate_refuses_wrong_options_before_it_loads_a_model(arguments, message, capsys):
    assert main(["generate", "p", *arguments, "--model", "/no/such/model"]) == 2
    assert message in capsys.readouterr().err


# hardpoint chat


def chat(monkeypatch, text, generator, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run_command("chat", list(arguments), generator)


def test_chat_keeps_the_conversation(monkeypatch, capsys):
    generator = FakeGenerator([["hel", "lo"], ["again"]])
    assert chat(monkeypatch, "hi\n\nmore\n", generator, "--system", "be kind") == 0
    assert capsys.readouterr().out == "hello\nagain\n"
    assert [(m["role"], m["content"]) for m in generator.asked[1][0]] == [
        ("system", "be kind"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "more"),
    ]
    assert generator.asked[0][1].max_tokens == 1024
    assert generator.closed


def test_chat_forgets_and_leaves(monkeypatch):
    generator = FakeGenerator([["a"], ["b"]])
    assert chat(monkeypatch, "one\n/reset\ntwo\n/exit\nthree\n", generator) == 0
    assert [m["content"] for m in generator.asked[1][0]] == ["two"]
    assert len(generator.asked) == 2


@pytest.mark.parametrize(
    "answer", [RequestError("too long"), [delta("", "error", error="too long")]]
)
def test_chat_in_a_pipe_ends_at_an_error(monkeypatch, capsys, answer):
    generator = FakeGenerator([answer, ["never"]])
    assert chat(monkeypatch, "one\ntwo\n", generator) == 1
    assert capsys.readouterr().err == "hardpoint: error: too long\n"
    assert len(generator.asked) == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def interactive(monkeypatch, lines, generator):
    waiting = iter(lines)

    def typed(prompt):
        assert prompt == "> "
        line = next(waiting, EOFError)
        if line is EOFError:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    return run_command("chat", [], generator)


def test_chat_on_a_terminal_goes_on_after_an_error(monkeypatch, capsys):
    generator = FakeGenerator([RequestError("too long"), ["fine"]])
    assert interactive(monkeypatch, ["one", "two"], generator) == 0
    assert [m["content"] for m in generator.asked[1][0]] == ["two"]
    captured = capsys.readouterr()
    assert captured.out == "fine\n\n"
    assert "smollm2. /reset forgets the conversation" in captured.err
    assert "hardpoint: error: too long" in captured.err


def test_chat_on_a_terminal_knows_its_commands(monkeypatch, capsys):
    assert interactive(monkeypatch, ["/what"], FakeGenerator([])) == 0
    assert "There is no command /what. /reset forgets" in capsys.readouterr().err


def test_chat_on_a_terminal_stops_an_answer_and_keeps_its_part(monkeypatch):
    class Interrupted(FakeGenerator):
        def stream(self, prompt, params=None):
            for output in super().stream(prompt, params):
                yield output
                if len(self.asked) == 1:
                    raise KeyboardInterrupt

    generator = Interrupted([["half", "never"], ["x"]])
    assert interactive(monkeypatch, ["one", "two"], generator) == 0
    assert [m["content"] for m in generator.asked[1][0]] == ["one", "half", "two"]


def test_chat_in_a_pipe_is_interrupted(monkeypatch):
    class Interrupted(FakeGenerator):
        def stream(self, prompt, params=None):
            raise KeyboardInterrupt

    generator = Interrupted([])
    with pytest.raises(KeyboardInterrupt):
        chat(monkeypatch, "one\n", generator)
    assert generator.closed


# hardpoint config


def test_config_show_prints_values_and_origins(folder, monkeypatch, capsys):
    (folder / "hardpoint.toml").write_text(
        '[plugins]\nenable = []\n[scheduler]\npolicy = "priority"'
    )
    monkeypatch.setenv("HARDPOINT__SEED", "4")
    assert main(["config", "show"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["PATH", "VALUE", "ORIGIN"]
    assert ["scheduler.policy", '"priority"', "file hardpoint.toml"] in lines
    assert ["seed", "4", "environment HARDPOINT__SEED"] in lines
    assert ["max_model_len", "none", "default"] in lines


def test_config_schema_describes_itself(capsys):
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)["$defs"]
    assert schema["SchedulerConfig"]["properties"]["max_num_seqs"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 65536,
        "default": EngineConfig().scheduler.max_num_seqs,
        "description": "maximum number of running requests; "
        "their block tables are allocated at start.",
    }

"""The commands `generate`, `chat` and `config`."""

import io
import json
import sys

import pytest
from support.fake_generator import FakeGenerator, delta, run_command

from hardpoint.cli import main
from hardpoint.plugins import (
    EngineConfig,
    Logprob,
    RequestError,
    RequestOutputKind,
)
from hardpoint.plugins.structured import StructuredOutputs

pytestmark = pytest.mark.usefixtures("folder")


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


def test_generate_takes_the_form_of_the_answer(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}\n')
    for arguments, expected in (
        (["choice=a=b", "choice=@c"], None),
        (["choice=a=b", "choice=c"], {"choice": ["a=b", "c"]}),
        ([f"json=@{schema}", "lenient=true"], {"json": {"type": "integer"}, "lenient": True}),
        (["regex=[0-9]+", "backend=other"], {"regex": "[0-9]+", "backend": "other"}),
        (["json_object=true"], {"json_object": True}),
    ):
        generator = FakeGenerator([[]])
        options = [f"--structured={argument}" for argument in arguments]
        if expected is None:
            with pytest.raises(RequestError, match="--structured: 'c' cannot be read: No such"):
                run_command("generate", ["p", *options], generator)
            continue
        run_command("generate", ["p", *options], generator)
        assert generator.asked[0][1].structured == StructuredOutputs(**expected)


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
        (["--structured", "json"], "--structured: expected KEY=VALUE such as regex=[0-9]+, got"),
        (["--structured", "regex=a", "--structured", "regex=b"], "regex is given twice"),
        (["--structured", "jsn=1"], "--structured.jsn: unknown field (did you mean 'json'?)"),
        (
            ["--plugin-args", "a.b=1", "--plugin-args", "a.b.c=1"],
            "--plugin-args: a.b.c cannot be set, for b is 1",
        ),
    ],
)
def test_generate_refuses_wrong_options_before_it_loads_a_model(arguments, message, capsys):
    assert main(["generate", "p", *arguments, "--model", "/no/such/model"]) == 2
    assert message in capsys.readouterr().err


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


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_config_show_leaves_out_the_userinfo_of_urls(folder, capsys, more):
    urls = ["rediss://:pass@word@h", "http://h/u@v", "me@h"]
    setting = f"plugins.enable={json.dumps(urls)}"
    nested = 'plugin.redis={url = "redis://u:pass@h/0"}'
    assert main(["config", "show", "--set", setting, "--set", nested, *more]) == 0
    text = capsys.readouterr().out
    assert "pass" not in text
    for shown in ("redis://***@h/0", "rediss://***@h", "http://h/u@v", "me@h"):
        assert f'"{shown}"' in text


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

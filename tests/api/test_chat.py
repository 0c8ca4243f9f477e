"""The command `chat`."""

import argparse
import io
import json
import sys

import pytest
from support.fake_generator import FakeGenerator, delta, run_command

from hardpoint.builtin_plugins.commands.sampling import add_sampling_options, prompt_params
from hardpoint.builtin_plugins.commands.terminal import WrappedOutput
from hardpoint.cli import main
from hardpoint.plugins import EngineConfig, ModelError, RequestError, SamplingParams

pytestmark = pytest.mark.usefixtures("folder")


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


def test_chat_shows_reasoning_and_does_not_send_it_again(monkeypatch, capsys):
    thought = delta("<think>Hm", content=None, reasoning="Hm")
    more = delta(".</think>Yes", content="Yes", reasoning=".")
    generator = FakeGenerator([[thought, more], ["b"]])
    assert chat(monkeypatch, "one\ntwo\n", generator) == 0
    assert capsys.readouterr().out == "Hm.\nYes\nb\n"
    assert [m["content"] for m in generator.asked[1][0]] == ["one", "Yes", "two"]


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


def interactive(monkeypatch, lines, generator, *arguments):
    waiting = iter(lines)

    def typed(prompt):
        assert prompt == "> "
        line = next(waiting, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    return run_command("chat", list(arguments), generator)


def test_chat_on_a_terminal_goes_on_after_an_error(monkeypatch, capsys):
    generator = FakeGenerator([RequestError("too long"), ["fine"]])
    assert interactive(monkeypatch, ["one", "two"], generator) == 0
    assert [m["content"] for m in generator.asked[1][0]] == ["two"]
    captured = capsys.readouterr()
    assert captured.out == "fine\n"  # the answers alone: standard output is no terminal
    assert "smollm2. /help lists the commands" in captured.err
    assert "hardpoint: error: too long" in captured.err


@pytest.mark.parametrize("word", ["exit", "quit", " Exit "])
def test_a_word_leaves_a_chat_on_a_terminal_alone(monkeypatch, word):
    generator = FakeGenerator([["a"], ["b"]])
    assert interactive(monkeypatch, ["one", word, "never"], generator) == 0
    assert len(generator.asked) == 1
    generator = FakeGenerator([["a"], ["b"]])
    assert chat(monkeypatch, f"one\n{word}\n", generator) == 0  # lines of a pipe are messages
    assert [m["content"] for m in generator.asked[1][0]][-1] == word.strip()


def test_chat_on_a_terminal_knows_its_commands(monkeypatch, capsys):
    assert interactive(monkeypatch, ["/what"], FakeGenerator([])) == 0
    assert "there is no command /what; /help lists them; //what sends it" in capsys.readouterr().err


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


def test_ctrl_c_twice_leaves_and_once_does_not(monkeypatch, capsys):
    generator = FakeGenerator([["a"]])
    lines = [KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt, "never"]
    assert interactive(monkeypatch, lines, generator) == 0
    assert len(generator.asked) == 1
    assert capsys.readouterr().err.count("Ctrl-C again, or Ctrl-D, leaves.") == 2


def test_a_backslash_goes_on_in_the_next_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    lines = iter(["one\\", "two"])
    prompts = []

    def typed(prompt):
        prompts.append(prompt)
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    generator = FakeGenerator([["a"]])
    assert run_command("chat", [], generator) == 0
    assert generator.asked[0][0][0]["content"] == "one\ntwo"
    assert prompts == ["> ", "  ", "> "]


def test_two_slashes_send_one(monkeypatch):
    generator = FakeGenerator([["a"]])
    assert chat(monkeypatch, "//etc\n", generator) == 0
    assert generator.asked[0][0][0]["content"] == "/etc"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rest", "there is no command /rest (did you mean '/reset'?); //rest sends it"),
        ("/reset now", "/reset: expected nothing after it, got 'now'"),
        ("/save", "/save: expected the name of a file"),
        ("/save /no/such/folder/x", "/no/such/folder/x cannot be written: No such file"),
        ("/save! /dev/null", "/dev/null cannot be written: it is no regular file"),
        ("/load nowhere", "nowhere cannot be read: No such file"),
        ("/load .", ". cannot be read: Is a directory"),
        ("/load a\0b", "'a\\x00b' cannot be read: embedded null"),
        ("/load ~nobody-here/a", "~nobody-here/a cannot be read: No such file or directory"),
        ("/load ~a\0b/c", "'~a\\x00b/c' cannot be read: embedded null"),
        ("/save ~nobody-here/a", "~nobody-here/a cannot be written: No such file or directory"),
        ("/save a\0b", "'a\\x00b' cannot be written: embedded null"),
    ],
)
def test_a_command_that_fails_is_one_line_and_loses_nothing(monkeypatch, capsys, line, message):
    generator = FakeGenerator([["a"], ["b"]])
    assert interactive(monkeypatch, ["one", line, "two"], generator) == 0
    assert [m["content"] for m in generator.asked[1][0]] == ["one", "a", "two"]
    assert f"hardpoint: error: {message}" in capsys.readouterr().err
    assert chat(monkeypatch, f"{line}\ntwo\n", FakeGenerator([])) == 1


def test_system_keeps_the_conversation(monkeypatch, capsys):
    generator = FakeGenerator([["a"], ["b"], ["c"]])
    lines = ["one", "/system be kind", "/system", "two", '/system ""', "/system", "three"]
    assert interactive(monkeypatch, lines, generator) == 0
    asked = [[m["content"] for m in messages] for messages, _ in generator.asked]
    assert asked[1] == ["be kind", "one", "a", "two"]
    assert asked[2] == ["one", "a", "two", "b", "three"]
    err = capsys.readouterr().err
    assert "be kind\n" in err
    assert "no system message\n" in err


def test_a_saved_conversation_goes_on(folder, monkeypatch, capsys):
    lines = ["one", "/save talk.json", "/save talk.json", "two", "/save! talk.json"]
    assert interactive(monkeypatch, lines, FakeGenerator([["a"], ["b"]]), "--system", "s") == 0
    assert "talk.json exists; /save! talk.json replaces it" in capsys.readouterr().err
    saved = json.loads((folder / "talk.json").read_text())
    assert saved["model"] == "smollm2"
    assert saved["sampling"]["max_tokens"] == 1024
    assert [m["content"] for m in saved["messages"]] == ["s", "one", "a", "two", "b"]
    generator = FakeGenerator([["c"]])
    assert chat(monkeypatch, "three\n", generator, "--load", "talk.json") == 0
    assert [m["content"] for m in generator.asked[0][0]] == ["s", "one", "a", "two", "b", "three"]
    assert [path.name for path in folder.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "bad.json is no saved conversation: Input data was truncated"),
        ('{"messages": [{"role": "x", "content": ""}]}', "Invalid enum value 'x'"),
        (None, "bad.json cannot be read: No such file"),
    ],
)
def test_a_wrong_file_is_refused_before_a_model_is_loaded(folder, capsys, content, message):
    if content is not None:
        (folder / "bad.json").write_text(content)
    assert main(["chat", "--load", "bad.json", "--model", "/no/such/model"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_the_old_model_goes_on_when_the_new_one_cannot_be_opened(monkeypatch, capsys):
    old, new = FakeGenerator([["a"]]), FakeGenerator([["b"]])
    opened = []

    def open_model(config, sources):
        opened.append((config.model, sources.of("model")))
        if config.model == "bad":
            raise ModelError("model: does not fit into memory")
        return old if len(opened) == 1 else new

    lines = ["one", "/model bad", "/model other", "two", "/model"]
    assert interactive(monkeypatch, lines, open_model) == 0
    assert opened[1:] == [("bad", "/model bad"), ("other", "/model other")]
    assert [m["content"] for m in new.asked[0][0]] == ["one", "a", "two"]
    assert (old.closed, new.closed) == (True, True)
    err = capsys.readouterr().err
    assert "hardpoint: error: model: does not fit into memory" in err
    assert "other, a context of 8192 tokens" in err


class SmallGenerator(FakeGenerator):
    """A context of 100 tokens; an answer has room for 25."""

    config = EngineConfig(max_model_len=100)


def test_a_full_context_refuses_the_message_and_names_the_limit(monkeypatch, capsys):
    generator = SmallGenerator([["a" * 30], ["b"]])
    lines = ["q" * 30, "r" * 16, "/reset", "r" * 16]
    assert interactive(monkeypatch, lines, generator) == 0
    assert [len(messages) for messages, _ in generator.asked] == [1, 1]
    err = capsys.readouterr().err
    assert "the conversation has 76 tokens, and 75 of 100 fit, for an answer needs room" in err
    assert "/reset begins again" in err


def test_the_oldest_turns_are_dropped_by_option_and_kept_for_save(folder, monkeypatch, capsys):
    generator = SmallGenerator([["a" * 10] for _ in range(8)])
    lines = [*(str(n) * 10 for n in range(8)), "/save all.json"]
    options = ("--when-full", "drop-oldest", "--system", "s")
    assert interactive(monkeypatch, lines, generator, *options) == 0
    asked = [[m["content"][0] for m in messages] for messages, _ in generator.asked]
    assert asked[3] == list("s0a1a2a3")
    assert asked[4] == list("s3a4")
    assert asked[5] == list("s3a4a5")
    assert capsys.readouterr().err.count("the oldest turns are no longer sent") == 1
    assert len(json.loads((folder / "all.json").read_text())["messages"]) == 17


@pytest.mark.parametrize(
    ("answer", "sent"),
    [
        (RequestError("too long"), "0a1a2"),
        ([delta("", "error", error="too long")], "0a1a2"),
        (["^C"], "0a1a2"),
        (["x", "^C"], "Qx2"),
        (["x"], "Qx2"),
    ],
)
def test_turns_are_dropped_once_a_message_has_an_answer(monkeypatch, capsys, answer, sent):
    class Interrupted(SmallGenerator):
        def stream(self, prompt, params=None):
            for output in super().stream(prompt, params):
                if output.outputs[0].text == "^C":
                    raise KeyboardInterrupt
                yield output

    generator = Interrupted([["a" * 10], ["a" * 10], answer, ["a"]])
    lines = ["0" * 10, "1" * 10, "Q" * 60, "2"]
    assert interactive(monkeypatch, lines, generator, "--when-full", "drop-oldest") == 0
    assert [len(messages) for messages, _ in generator.asked[:3]] == [1, 3, 1]
    assert "".join(m["content"][0] for m in generator.asked[3][0]) == sent
    is_shown = "the oldest turns are no longer sent" in capsys.readouterr().err
    assert is_shown == (sent == "Qx2")


@pytest.mark.parametrize(
    ("tokens", "why"),
    [(50, "after --max-tokens 50"), (99, "the context of 100 tokens is full")],
)
def test_an_answer_that_was_cut_is_marked(monkeypatch, capsys, tokens, why):
    answer = [delta("a") for _ in range(tokens - 1)] + [delta("a", "length")]
    assert chat(monkeypatch, "q\n", SmallGenerator([answer]), "--max-tokens", "50") == 0
    captured = capsys.readouterr()
    assert captured.out == "a" * tokens + "\n"
    assert captured.err.startswith("The answer was cut")
    assert why in captured.err


def test_a_conversation_samples_as_the_model_recommends(monkeypatch):
    class Recommending(FakeGenerator):
        def default_sampling_params(self):
            return SamplingParams(temperature=0.7, top_k=20)

    def params(generator, *arguments):
        chat(monkeypatch, "q\n", generator, *arguments)
        return generator.asked[0][1]

    found = params(Recommending([["a"]]), "--top-k", "5")
    assert (found.temperature, found.top_k, found.repetition_penalty) == (0.7, 5, 1.0)
    found = params(FakeGenerator([["a"]]), "--temperature", "0")
    assert (found.temperature, found.top_p, found.repetition_penalty) == (0.0, 0.9, 1.1)


@pytest.mark.parametrize(
    ("recommended", "arguments", "expected"),
    [
        ({}, (), (0.0, 1.0, 1.0)),
        ({"temperature": 0.2, "top_p": 0.9}, (), (0.2, 0.9, 1.0)),
        ({"temperature": 0.2, "top_p": 0.9}, ("--temperature", "0"), (0.0, 0.9, 1.0)),
    ],
)
def test_prompts_are_sampled_as_the_model_recommends(monkeypatch, recommended, arguments, expected):
    class Recommending(FakeGenerator):
        def default_sampling_params(self):
            return SamplingParams(**recommended)

    parser = argparse.ArgumentParser()
    add_sampling_options(parser, max_tokens=5, temperature="")
    given = parser.parse_args(arguments)
    found = prompt_params(given, Recommending([]))
    assert (found.temperature, found.top_p, found.repetition_penalty) == expected


# Wrapping


def wrapped(text, columns, pieces=1):
    screen = io.StringIO()
    output = WrappedOutput(screen, columns)
    for start in range(0, len(text), pieces):
        output.write(text[start : start + pieces])
    output.end()
    return screen.getvalue()


def test_reasoning_is_dim_and_ends_with_its_line(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = io.StringIO()
    output = WrappedOutput(screen, 10)
    for text, reasoning in (("so it", True), (" is ", True), ("Yes, it is.", False)):
        output.write(text, reasoning=reasoning)
    output.end()
    assert screen.getvalue() == "\x1b[2mso it is\n\x1b[0mYes, it\nis.\n"
    monkeypatch.setenv("NO_COLOR", "1")
    screen = io.StringIO()
    output = WrappedOutput(screen, 10)
    output.write("so", reasoning=True)
    output.end()
    assert screen.getvalue() == "so\n"


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three four", "one two\nthree four\n"),
        ("exactly 10 more", "exactly 10\nmore\n"),
        ("  - item goes on", "  - item\ngoes on\n"),
        ("one\n\ntwo \nthree\n", "one\n\ntwo\nthree\n"),
        ("a verylongwordindeed b", "a\nverylongwordindeed b\n"),
        ("ab 你好你好你好", "ab 你好你\n好你好\n"),
        ("1234 你好你。", "1234 你好\n你。\n"),
        (
            "cafe\u0301 e\u0301e\u0301e\u0301e\u0301e\u0301",
            "cafe\u0301 e\u0301e\u0301e\u0301e\u0301e\u0301\n",
        ),
        (
            "```py\na  long line of code\n```\none two three",
            "```py\na  long line of code\n```\none two\nthree\n",
        ),
        ("```x``` one two", "```x``` one\ntwo\n"),
        ("\x1b[2Jred\r\nx", "␛[2Jred\nx\n"),
        ("", ""),
    ],
)
def test_answers_are_wrapped_between_words(text, shown, pieces):
    columns = 11 if "```x" in text else 10
    assert wrapped(text, columns, pieces) == shown

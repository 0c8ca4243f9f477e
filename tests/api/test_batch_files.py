"""`hardpoint generate --file` with files of OpenAI's batch service."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from support.scripted_folder import write_config

from hardpoint import async_llm
from hardpoint.builtin_plugins.commands.answer_file import AnswerFile
from hardpoint.builtin_plugins.server.batches.lines import BatchReader, is_batch_line
from hardpoint.cli import main
from hardpoint.plugins import RequestError
from hardpoint.process.client.event_loop import EventLoopBridge

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


def line(custom_id="a", url="/v1/completions", method="POST", **body):
    body = body or {"prompt": "say abc", "max_tokens": 3}
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


@pytest.fixture
def here(scripted, tmp_path, monkeypatch):
    write_config(tmp_path, scripted, "scheduler.max_num_seqs = 2")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*lines):
    texts = (text if isinstance(text, str) else json.dumps(text) for text in lines)
    Path("b.jsonl").write_text("".join(f"{text}\n" for text in texts))


def run(*options):
    return main(["generate", "--file", "b.jsonl", "--output", "a.jsonl", *options])


def answers():
    lines = [json.loads(text) for text in Path("a.jsonl").read_text().splitlines()]
    return {answer["custom_id"]: answer for answer in lines}


class TestAnswers:
    def test_completions_are_those_of_the_server(self, here, capsys):
        write(*(line(f"request {number}") for number in range(7)))
        assert run() == 0
        assert "hardpoint: 7 requests finished, " in capsys.readouterr().err
        found = answers()
        assert sorted(found) == [f"request {number}" for number in range(7)]
        for answer in found.values():
            assert list(answer) == ["id", "custom_id", "response", "error"]
            assert answer["error"] is None
            assert answer["id"].startswith("batch_req_")
            response = answer["response"]
            assert response["status_code"] == 200
            assert response["request_id"].startswith("req-")
            assert response["body"]["object"] == "text_completion"
            assert response["body"]["choices"][0]["text"] == " ab"
            assert response["body"]["usage"]["completion_tokens"] == 3

    def test_conversations_have_the_options_of_the_route(self, here):
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}
        write(line("a", url=CHAT, **body), line("b", url=CHAT, **body, frequency_penalti=1))
        assert run() == 1
        found = answers()
        (choice,) = found["a"]["response"]["body"]["choices"]
        assert choice["message"]["content"] == "hel"
        assert len(choice["logprobs"]["content"]) == 3
        message = found["b"]["response"]["body"]["error"]["message"]
        assert message.startswith("frequency_penalti: unknown field")

    def test_the_example_of_the_page(self, here, capsys):
        page = (ROOT / "docs/command-line.md").read_text().partition("$ cat batch.jsonl\n")[2]
        given, _, rest = page.partition("$ hardpoint generate")
        written = rest.partition("$ cat answers.jsonl\n")[2].partition("```")[0].splitlines()
        Path("b.jsonl").write_text(given)
        assert run() == 1
        expected = rest.splitlines()[2].replace("batch.jsonl", "b.jsonl")
        assert capsys.readouterr().err.splitlines().count(expected) == 1
        found = [json.loads(text) for text in Path("a.jsonl").read_text().splitlines()]
        assert [answer["custom_id"] for answer in found] == ["b", "a"]
        for answer, text in zip(found, written, strict=True):
            assert f'"custom_id":"{answer["custom_id"]}","response":' in text
        assert '"param":"method","line":2}}' in written[0]
        assert found[0]["error"]["param"] == "method"

    def test_what_the_route_refuses_has_its_answer(self, here, capsys):
        write(line("a", prompt="hi", max_tokens=-1), line("b"), line("c", model="gpt", prompt="x"))
        assert run() == 1
        found = answers()
        assert found["a"]["response"]["status_code"] == 400
        assert "max_tokens" in found["a"]["response"]["body"]["error"]["message"]
        assert found["a"]["error"] is None
        assert found["b"]["response"]["status_code"] == 200
        assert found["c"]["response"]["status_code"] == 404
        assert found["c"]["response"]["body"]["error"]["code"] == "model_not_found"
        assert "2 requests failed; the first one: id 'a': max_tokens" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("setting", "n"),
        [
            pytest.param("max_waiting = 1", 1, marks=pytest.mark.nightly),
            ("max_waiting = 2", 2),
            pytest.param("max_waiting_tokens = 1", 1, marks=pytest.mark.nightly),
            ("max_waiting_tokens = 20", 2),
        ],
    )
    def test_what_there_is_no_room_for_waits(self, here, scripted, setting, n):
        write_config(here, scripted, "scheduler.max_num_seqs = 3", f"scheduler.{setting}")
        body = {"prompt": "say abc", "max_tokens": 20, "n": n}
        write(*(line(f"r{number}", **body) for number in range(30)))
        assert run() == 0
        assert {one["response"]["status_code"] for one in answers().values()} == {200}
        assert len(answers()) == 30

    def test_what_there_is_never_room_for_is_answered_so(self, here, scripted, capsys):
        write_config(here, scripted, "scheduler.max_num_seqs = 2", "scheduler.max_waiting = 1")
        write(line("a", prompt="say abc", n=9), line("b", prompt="say abc", n=9), line("c"))
        assert run() == 1
        found = {name: one["response"]["status_code"] for name, one in answers().items()}
        assert found == {"a": 429, "b": 429, "c": 200}

    def test_a_wrong_line_has_its_own_error(self, here, capsys):
        write(line("a"), line("b", method="GET"), '{"custom_id": ', line("d", stream=True))
        assert run() == 1
        lines = [json.loads(text) for text in Path("a.jsonl").read_text().splitlines()]
        wrong = {answer["error"]["line"]: answer for answer in lines if answer["error"]}
        assert sorted(wrong) == [2, 3, 4]
        assert wrong[2]["custom_id"] == "b"
        assert wrong[2]["response"] is None
        assert wrong[2]["error"] == {
            "code": "invalid_value",
            "message": "b.jsonl:2: method: expected 'POST', got \"GET\"",
            "param": "method",
            "line": 2,
        }
        assert wrong[3]["custom_id"] is None
        assert wrong[3]["error"]["code"] == "invalid_json_line"
        assert wrong[4]["error"]["message"] == "b.jsonl:4: body.stream: expected false, got True"
        assert answers()["a"]["response"]["status_code"] == 200
        assert "3 requests failed; the first one: id 'b'" in capsys.readouterr().err

    def test_keys_and_names_of_a_server_do_not_bind_it(self, here, scripted):
        names = 'server.allowed_hosts = ["a.example"]'
        others = ('server.root_path = "/llm"', 'server.keys_file = "none.toml"')
        write_config(here, scripted, names, *others)
        write(line())
        assert run() == 0
        assert answers()["a"]["response"]["status_code"] == 200

    def test_a_run_goes_on(self, here, capsys):
        write(line("a"), line("b", method="GET"), line("c", prompt="x", max_tokens=-1))
        assert run() == 1
        first = answers()["a"]
        write(line("a"), line("b"), line("c"))
        assert run("--resume") == 0
        assert "3 requests finished (1 before)" in capsys.readouterr().err
        found = answers()
        assert found["a"] == first
        assert [found[name]["response"]["status_code"] for name in "abc"] == [200, 200, 200]
        assert run("--resume") == 0
        assert "a.jsonl has all 3 answers" in capsys.readouterr().err

    def test_a_changed_request_does_not_go_on(self, here, capsys):
        write(line("a"))
        assert run() == 0
        write(line("a", prompt="another"))
        assert run("--resume") == 2
        assert "the id 'a' has the answer to another prompt" in capsys.readouterr().err

    def test_a_pipe_is_read_once(self, here, monkeypatch, capsys):
        given = "\n" + json.dumps(line("a")) + "\n" + json.dumps(line("b")) + "\n"
        stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", "--file", "-"]) == 0
        found = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
        assert sorted(answer["custom_id"] for answer in found) == ["a", "b"]


class TestStopped:
    """Answers are kept, and --resume does the rest."""

    @pytest.fixture
    def stopped(self, here, monkeypatch):
        """Run 20 requests, and call a function once the second one is answered."""

        def run_until(stop):
            written = AnswerFile.write
            count = itertools.count(1)

            def write_and_stop(file, answer):
                written(file, answer)
                if next(count) == 2:
                    stop()

            write(*(line(f"{number}") for number in range(20)))
            with monkeypatch.context() as patch:
                patch.setattr(AnswerFile, "write", write_and_stop)
                return run()

        return run_until

    def test_by_an_interrupt(self, stopped, capsys):
        assert stopped(lambda: os.kill(os.getpid(), signal.SIGINT)) == 130
        assert "with --resume goes on with a.jsonl" in capsys.readouterr().err
        before = len(answers())
        assert 2 <= before < 20
        assert run("--resume") == 0
        assert len(answers()) == 20
        assert f"20 requests finished ({before} before)" in capsys.readouterr().err

    @pytest.fixture
    def kill(self, monkeypatch):
        """Return a function that kills the engine's process."""
        pids = []
        opened = async_llm.open_resolved

        def open_resolved(*arguments, **options):
            llm = opened(*arguments, **options)
            pids.append(llm.engines.pid)
            return llm

        monkeypatch.setattr(async_llm, "open_resolved", open_resolved)
        return lambda: os.kill(pids[0], signal.SIGKILL)

    def check_goes_on(self, capsys):
        assert "error: " in capsys.readouterr().err
        found = answers()
        assert 2 <= len(found) < 20
        assert {answer["response"]["status_code"] for answer in found.values()} == {200}
        assert run("--resume") == 0
        assert len(answers()) == 20

    def test_by_the_death_of_the_engine(self, stopped, kill, capsys):
        assert stopped(kill) == 2
        self.check_goes_on(capsys)

    def test_by_a_death_that_requests_notice_first(self, stopped, kill, monkeypatch, capsys):
        with Path("hardpoint.toml").open("a") as file:
            file.write("\n[server.limits]\nrequests = 1\n")  # none waits in the engine
        has_ended = threading.Event()
        report = EventLoopBridge.__call__

        def report_late(bridge, item):
            if isinstance(item, Exception):
                has_ended.set()
                time.sleep(0.3)
            report(bridge, item)

        def kill_first():
            kill()
            assert has_ended.wait(60)

        monkeypatch.setattr(EventLoopBridge, "__call__", report_late)
        assert stopped(kill_first) == 2
        self.check_goes_on(capsys)


class TestRefused:
    """Before a model is loaded."""

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            (line("a"), "b.jsonl:2: custom_id: expected a new one, got 'a', which line 1 has"),
            (
                line("b", url=CHAT, messages=[]),
                "b.jsonl:2: url: expected '/v1/completions', as line 1 has, for a file has one "
                "url, got '/v1/chat/completions'",
            ),
        ],
        ids=["custom-id", "url"],
    )
    def test_lines_that_are_at_odds(self, here, second, message, capsys):
        write(line("a"), second)
        assert run() == 2
        assert message in capsys.readouterr().err
        assert not Path("a.jsonl").exists()

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            (["--temperature", "1"], "--temperature"),
            (["--max-tokens", "9"], "--max-tokens"),
            (["--chat"], "--chat"),
        ],
        ids=["temperature", "max-tokens", "chat"],
    )
    def test_options_that_bodies_have(self, here, options, name, capsys):
        write(line("a"))
        assert run(*options) == 2
        assert f"{name}: expected none for a file of OpenAI's batch service" in (
            capsys.readouterr().err
        )

    def test_the_server_may_not_be_left_out(self, here, scripted, capsys):
        write_config(here, scripted, 'plugins.disable = ["server"]')
        write(line("a"))
        assert run() == 2
        assert "plugins.disable: expected a list without 'server'" in capsys.readouterr().err


class TestLines:
    @pytest.mark.parametrize(
        ("changes", "param", "message"),
        [
            ({"custom_id": ""}, "custom_id", "custom_id: expected a text that is not empty"),
            ({"custom_id": 3}, "custom_id", "custom_id: expected a text that is not empty, got 3"),
            ({"url": "/v1/images"}, "url", "url: expected '/v1/chat/completions' or "),
            ({"url": {}}, "url", "url: expected '/v1/chat/completions' or "),
            ({"body": []}, "body", "body: expected an object, which is not too deep, got []"),
            ({"bodi": 1}, "bodi", "bodi: unknown field (did you mean 'body'?); known: custom_id"),
        ],
        ids=["empty-id", "id-of-a-number", "url", "url-of-an-object", "body", "unknown"],
    )
    def test_wrong_fields(self, changes, param, message):
        read = BatchReader("f", "m").read(5, json.dumps(line() | changes))
        assert read.problem.param == param
        assert read.problem.line == 5
        assert message in read.problem.message

    @pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
    @pytest.mark.parametrize("value", ["1e999", "9" * 5000], ids=["float", "digits"])
    def test_numbers_that_are_too_large(self, name, value):
        text = json.dumps(line() | {name: "?"}).replace('"?"', value)
        problem = BatchReader("f", "m").read(1, text).problem
        assert problem.message.startswith(f"f:1: {name}: expected ")
        assert value[:60] in problem.message

    def test_missing_fields_are_named(self):
        for name in ("custom_id", "method", "url", "body"):
            fields = line()
            del fields[name]
            problem = BatchReader("f", "m").read(1, json.dumps(fields)).problem
            assert problem.code == "missing_required_parameter"
            assert problem.message == f"f:1: {name}: expected a value, got none"

    def test_the_body_is_passed_as_it_is(self):
        text = '{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"x": 1.50, "x":2}}'
        read = BatchReader("f", "m").read(1, text)
        assert read.body == b'{"x": 1.50, "x":2}'

    def test_digests_tell_requests_and_models_apart(self):
        digests = {
            BatchReader("f", model).read(1, json.dumps(fields)).digest
            for model in ("m", "n")
            for fields in (line("a"), line("b"), line("a", prompt="x"))
        }
        assert len(digests) == 6

    @pytest.mark.parametrize("methods", [("GET", "POST"), ("POST", "GET"), ("GET", "GET")])
    def test_a_wrong_line_has_an_id_of_its_own(self, methods):
        """Else --resume would find the answer to one line under the id of the other one."""
        first, second = (json.dumps(line("a", method=method)) for method in methods)
        reader = BatchReader("f", "m")
        reader.read(1, first)
        with pytest.raises(RequestError, match=r"f:2: custom_id: expected a new one, got 'a'"):
            reader.read(2, second)

    def test_lines_without_an_id_are_not_at_odds(self):
        reader = BatchReader("f", "m")
        problems = [reader.read(n, text).problem for n, text in enumerate(["{", "{", "{}"], 1)]
        assert [problem.line for problem in problems] == [1, 2, 3]

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            (json.dumps(line()), True),
            ('{"custom_id": "a"}', True),
            ('{"method": 1, "url": 2, "body": 3}', True),
            ('{"prompt": "a"}', False),
            ('"custom_id"', False),
            ("{", False),
            ("", False),
        ],
        ids=["whole", "id-alone", "no-id", "prompt", "text", "no-json", "empty"],
    )
    def test_files_are_told_apart_by_their_first_line(self, text, found):
        assert is_batch_line(text) is found

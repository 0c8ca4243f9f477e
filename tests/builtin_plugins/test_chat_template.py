"""Chat templates: programs of a model's author, which render in a process with limits."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from support.internals import limited_process_of, set_time_limit
from support.waiting import alive, wait_until

from hardpoint.builtin_plugins.tokenizer.chat_template import ChatRenderer
from hardpoint.plugins import RequestError

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatRenderer]:
    made = ChatRenderer(seconds=60.0, max_characters=100_000)
    yield made
    made.close()


@pytest.fixture
def hasty() -> Iterator[ChatRenderer]:
    """Templates with little time, because they would take any amount of it."""
    made = ChatRenderer(seconds=0.2, max_characters=100_000)
    yield made
    made.close()


def text(renderer: ChatRenderer, template: str, messages: object = HELLO) -> str:
    variables = {"bos_token": "<s>"}
    return renderer.render(messages, template, add_generation_prompt=True, variables=variables)


LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}"
END = "{% endfor %}{% endfor %}"
TIME_OR_MEMORY = r"it takes more than 0.2 s \(the option template_seconds .*\) or too much memory"


@pytest.mark.parametrize(
    ("template", "message"),
    [(LOOP + END, TIME_OR_MEMORY), ("{{ 7 ** (10 ** 9) }}", TIME_OR_MEMORY)],
)
def test_what_takes_a_template_long_is_refused(template, message, hasty):
    start = time.perf_counter()
    with pytest.raises(RequestError, match=message):
        text(hasty, template)
    assert time.perf_counter() - start < 60
    set_time_limit(limited_process_of(hasty), 60.0)  # for the process that comes next
    assert text(hasty, "{{ messages[0].content }}{{ bos_token }}") == "hello<s>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOP + "text" + END, r"its text is longer than 100000 characters \(template_characters\)"),
        ("{{ 'a' * 10 ** 9 }}", "it needs too much memory"),
        ("{{ '%1000000000d' % 1 }}", "it needs too much memory"),
        ("{{ 'a'.center(10 ** 9) }}", "it needs too much memory"),
        (
            "{% set ns = namespace(x='ab') %}" + LOOP + "{% set ns.x = ns.x ~ ns.x %}" + END,
            "memory",
        ),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}", "without a leading _, got"),
        ("{% include 'x' %}", "no loader for this environment"),
        ("{{ raise_exception('no system message') }}", "refuses them: no system message"),
    ],
)
def test_what_a_template_may_not_take_is_refused(template, message, renderer):
    with pytest.raises(RequestError, match=message):
        text(renderer, template)
    assert text(renderer, "{{ messages[0].content }}{{ bos_token }}") == "hello<s>"


@dataclasses.dataclass
class Picture:
    url: str

    def delete(self) -> None:
        raise AssertionError("a template called it")


def test_templates_see_plain_data(renderer):
    picture = [{"role": "user", "content": [{"picture": Picture("u"), "other": object()}]}]
    inner = "messages[0].content[0]"
    assert text(renderer, f"{{{{ {inner}.picture.url }}}}{{{{ {inner}.other }}}}", picture) == (
        "u<object>"
    )
    with pytest.raises(RequestError, match="has no attribute 'delete'"):
        text(renderer, f"{{{{ {inner}.picture.delete() }}}}", picture)
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(RequestError, match="messages: expected plain data: Circular reference"):
        text(renderer, "x", [{"role": "user", "content": circle}])


def test_what_transformers_offers_to_templates(renderer):
    template = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ messages[0].reasoning_content }}{{ tools is none }}"
    )
    message = {"role": "assistant", "content": "<é>", "reasoning": "why"}
    plain = '{"role": "user", "content": "<é>"}'
    messages = [message, *[{"role": "user", "content": "<é>"}] * 3]
    rendered = text(renderer, template, messages)
    assert rendered.endswith(f"{plain}4whyTrue")
    assert rendered.count("<é>") == 2


def test_threads_wait_and_a_fork_has_its_own_process(renderer):
    rendered: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: rendered.append(text(renderer, f"{i}")))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rendered) == [str(i) for i in range(8)]
    if (child := os.fork()) == 0:
        good = text(renderer, "child") == "child"
        renderer.close()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert text(renderer, "parent") == "parent"


STOPPED = """
import os, signal
from hardpoint.builtin_plugins.tokenizer.chat_template import ChatRenderer
renderer = ChatRenderer(60.0, 1000)
renderer.render([{"role": "user", "content": "x"}], "x", add_generation_prompt=False, variables={})
os.kill(renderer._process.pid, signal.SIGSTOP)
print(renderer._process.pid, flush=True)
os._exit(0)
"""


def test_a_process_that_is_stopped_ends_with_its_parent():
    done = subprocess.run(
        [sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=120, check=True
    )
    wait_until(lambda: not alive(int(done.stdout)), what="the end of the process")


def test_calls_have_the_form_that_a_template_wants(renderer):
    """Ids of nine characters, as Mistral's; arguments as a text, as DeepSeek's."""
    call = {"id": "call_0123456789abcdef", "function": {"name": "f", "arguments": {"a": "ä"}}}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call], "content": ""},
        {"role": "tool", "tool_call_id": call["id"], "content": "1"},
    ]
    nine = (
        "{% for id in [messages[1].tool_calls[0].id, messages[2].tool_call_id] %}"
        "{% if id|length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
        "{% endif %}{{ id }} {% endfor %}"
    )
    of_call, of_result = text(renderer, nine, messages).split()
    assert of_call == of_result
    assert re.fullmatch("[a-zA-Z0-9]{9}", of_call)
    call["id"] = messages[-1]["tool_call_id"] = "abcDEF123"
    assert text(renderer, nine, messages).split() == ["abcDEF123"] * 2
    joined = "{{ 'arguments: ' + messages[1].tool_calls[0].function.arguments }}"
    assert text(renderer, joined, messages) == 'arguments: {"a": "ä"}'
    with pytest.raises(RequestError, match="it failed: TypeError: "):
        text(renderer, "{{ 'x' + messages[0] }}", messages)

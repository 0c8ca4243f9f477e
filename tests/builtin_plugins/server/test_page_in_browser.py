"""The web page in headless Chromium: its behavior, and the rules of the browser."""

import base64
import contextlib
import itertools
import json
import re

import msgspec
import pytest
from starlette.responses import JSONResponse, Response
from support.browser import new_page, running_browser
from support.fake_engine import FakeEngine, HeldEngine, configured
from support.http_server import running
from support.live_view import bearer, running_live_view
from support.pictures import data_url, encoded, gradient
from support.waiting import wait_until

from hardpoint.plugins import OverloadedError, RequestError, SamplingParams
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.plugins.server import Middleware

pytestmark = pytest.mark.nightly

WORDS = " ".join(f"Sentence number {number} ends here." for number in range(40))
HOSTILE = (
    "<img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3)) "
    "![b](http://evil.test/pixel.png) <https://evil.test> [c](data:text/html,x) [d](//evil.test) "
    "[e](https://good.test/page)"
)
TAGS = "a br button code details div em h2 label li p pre span strong summary textarea"
ALLOWED_TAGS = {*TAGS.split()}
SCHEMAS = {
    "acme_bias": {"$ref": "#/components/schemas/AcmeBias"},
    "acme_words": {"type": "array", "items": {"type": "string"}},
    "acme_any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
}
BIAS = {
    "type": "object",
    "properties": {
        "strength": {"type": "number", "minimum": 0, "maximum": 1, "description": "How much."},
        "mode": {"anyOf": [{"enum": ["soft", "hard"]}, {"type": "null"}], "default": None},
        "is_on": {"type": "boolean", "default": False},
        "table": {"type": "object", "additionalProperties": {"type": "number"}},
    },
}


def described(schemas):
    """Return a middleware that answers /openapi.json with the schemas of plugins, if any."""

    def wrap(app):
        async def wrapped(scope, receive, send):
            if scope["path"] != "/openapi.json":
                await app(scope, receive, send)
                return
            parts = {"PluginArgs": {"type": "object", "properties": schemas}, "AcmeBias": BIAS}
            answer = JSONResponse({"openapi": "3.1.0", "components": {"schemas": parts}})
            await (Response(status_code=404) if schemas is None else answer)(scope, receive, send)

        return wrapped

    return Middleware(wrap=wrap)


@pytest.fixture(scope="module")
def browser():
    with running_browser() as running_chromium:
        yield running_chromium


@pytest.fixture(scope="module")
def server():
    engine = HeldEngine(config=configured(), extensions=[("api", described(SCHEMAS))])
    with running(engine) as running_server:
        yield running_server


@pytest.fixture
def page(browser, server):
    """The chat page of a server with a new engine."""
    fresh = FakeEngine()
    for name in ("text", "reasoning", "calls", "finish_reason", "delay", "error", "aborted"):
        setattr(server.engine, name, getattr(fresh, name))
    server.engine.asked.clear()
    server.engine.go_on.set()
    with new_page(browser, server.url + "/") as new:
        new.wait_for("document.querySelectorAll('#plugins summary').length === 3")
        yield new


def ask(page, text="Hello"):
    page.evaluate("document.querySelector('#message').focus()")
    page.type(text)
    page.press("Enter", "\r")


def answered(page, count=1):
    """Wait until some answers are complete; return the text of the last one."""
    page.wait_for(
        "document.querySelectorAll('.answer[aria-busy=false]').length === "
        f"{count} && !document.querySelector('.answer[aria-busy=true]')"
    )
    return page.evaluate("[...document.querySelectorAll('.answer')].at(-1).innerText")


def fill(page, label, text):
    """Write into the field of a label."""
    page.evaluate(
        f"""(() => {{
          const label = [...document.querySelectorAll('label')]
            .find((node) => node.textContent === {json.dumps(label)});
          const field = document.getElementById(label.htmlFor);
          field.closest('details')?.setAttribute('open', '');
          field.focus();
          if (field.tagName === 'SELECT') {{
            field.value = [...field.options].find((o) => o.text === {json.dumps(text)}).value;
          }} else {{
            field.select();
          }}
        }})()"""
    )
    if page.evaluate("document.activeElement.tagName") != "SELECT":
        page.type(text)


def check_nothing_outside(page, url):
    """Check that the page asked for nothing but the server's own, and the browser saw no wrong."""
    outside = [address for address in page.requested() if not address.startswith((url, "data:"))]
    assert outside == []
    assert page.problems() == []


def test_an_answer_streams_in(page, server, tmp_path):
    server.engine.text, server.engine.at_once = WORDS, 60
    server.engine.go_on.clear()
    server.engine.reasoning = "They greet me."
    before = page.screenshot(tmp_path / "before.png")
    ask(page, "Hello there")
    page.wait_for("document.querySelector('.answer .body').innerText.length > 100")
    first = page.text(".answer .body")
    middle = page.screenshot(tmp_path / "middle.png")
    server.engine.at_once = 120
    page.wait_for(f"document.querySelector('.answer .body').innerText.length > {len(first)}")
    assert page.evaluate("document.querySelector('.answer').ariaBusy") == "true"
    server.engine.go_on.set()
    whole = answered(page)
    assert len({before, middle, page.screenshot(tmp_path / "after.png")}) == 3
    assert first in WORDS
    assert page.text(".answer .body") == WORDS
    assert page.text(".message.user .body") == "Hello there"
    tokens = 40 * 5 + 3
    assert re.search(rf"{tokens} tokens · [\d.]+ tokens/s · first after [\d.]+ s", whole)
    assert server.engine.asked[-1][0][-1] == {"role": "user", "content": "Hello there"}
    check_nothing_outside(page, server.url)


def test_thinking_is_folded_until_somebody_opens_it(page, server):
    server.engine.reasoning = "They greet me."
    ask(page)
    assert "They greet me." not in answered(page)
    assert page.text(".thinking summary") == "Thinking"
    page.click(".thinking summary")
    assert page.text(".thinking .plain") == "They greet me."


@pytest.mark.timing
def test_screen_readers_hear_sentences(page, server):
    server.engine.text, server.engine.delay = WORDS, 0.01
    ask(page)
    answered(page)
    assert page.evaluate("document.querySelector('#announcements').ariaLive") == "polite"
    parts = page.evaluate(
        "[...document.querySelectorAll('#announcements p')].map((node) => node.textContent)"
    )
    assert 1 < len(parts) < 10
    assert all(part.endswith("here.") for part in parts)
    assert " ".join(parts) == WORDS


def test_stop_ends_the_request_and_retry_asks_again(page, server):
    server.engine.text, server.engine.at_once = WORDS, 20
    server.engine.go_on.clear()
    ask(page)
    page.wait_for("document.querySelector('.answer .body').innerText.length > 30")
    page.click("#stop")
    assert "You stopped it." in answered(page)
    assert page.evaluate("document.querySelectorAll('.answer .problem').length") == 0
    wait_until(lambda: server.engine.aborted == 1 and server.engine.open == 0)
    server.engine.text = "Short ."
    server.engine.go_on.set()
    page.click(".retry")
    page.wait_for("document.querySelector('.answer .body').innerText === 'Short .'")
    answered(page)
    assert server.engine.asked[-1][0] == [{"role": "user", "content": "Hello"}]
    assert len(server.engine.asked) == 2


def test_the_last_message_can_be_edited(page, server):
    ask(page, "First")
    answered(page)
    ask(page, "Secand")
    answered(page, 2)
    shown = "[...document.querySelectorAll('.last-only')].filter((n) => n.checkVisibility()).length"
    assert page.evaluate(shown) == 1
    page.click(".message.user.is-last .last-only")
    assert page.evaluate("document.activeElement.value") == "Secand"
    page.press("Escape")
    assert page.text(".message.user.is-last .body") == "Secand"
    page.click(".message.user.is-last .last-only")
    page.evaluate("document.activeElement.select()")
    page.type("Second")
    page.click(".edit .primary")
    answered(page, 2)
    contents = [message["content"] for message in server.engine.asked[-1][0]]
    assert contents == ["First", "Hello there , friend", "Second"]
    page.click("#new-chat")
    assert page.evaluate("document.querySelectorAll('.message').length") == 0
    assert page.evaluate("document.activeElement.id") == "message"


def test_settings_go_with_the_request(page, server):
    page.click("#settings-button")
    fill(page, "System prompt", "Be brief.")
    fill(page, "Temperature", "0.3")
    fill(page, "Max tokens", "3")
    fill(page, "Stop at", "one\ntwo")
    fill(page, "strength", "0.5")
    fill(page, "mode", "hard")
    fill(page, "is_on", "no")
    fill(page, "table", '{"7": 1.5}')
    fill(page, "acme_words", "one\ntwo words")
    fill(page, "acme_any", "[1, null]")
    ask(page)
    assert "Cut off" not in answered(page)
    messages, params, _ = server.engine.asked[-1]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert (params.temperature, params.max_tokens, params.stop) == (0.3, 3, ["one", "two"])
    assert params.plugin_args == {
        "acme_bias": {"strength": 0.5, "mode": "hard", "is_on": False, "table": {"7": 1.5}},
        "acme_words": ["one", "two words"],
        "acme_any": [1, None],
    }
    check_nothing_outside(page, server.url)


def test_a_wrong_setting_is_shown_where_it_is(page, server):
    page.click("#settings-button")
    fill(page, "strength", "2")
    ask(page)
    assert "strength is 2. Expected: 0 to 1." in answered(page)
    assert page.evaluate("document.activeElement.name") == "strength"
    assert page.evaluate("document.activeElement.ariaInvalid") == "true"
    assert server.engine.asked == []
    fill(page, "strength", "1")
    server.engine.error = RequestError("top_p: expected at most 1, got 3")
    page.click(".retry")
    page.wait_for("document.querySelector('.problem').innerText.startsWith('top_p: expected')")
    answered(page)
    assert page.evaluate("document.activeElement.name") == "top_p"


def test_without_a_description_arguments_are_json(browser):
    engine = FakeEngine(config=configured(), extensions=[("api", described(None))])
    with running(engine) as server, new_page(browser, server.url + "/") as page:
        page.wait_for("document.querySelector('#plugins textarea')")
        page.click("#settings-button")
        fill(page, "Arguments by plugin", '{"acme": {"a": 1}}')
        ask(page)
        answered(page)
        assert engine.asked[-1][1].plugin_args == {"acme": {"a": 1}}


def test_tool_calls_are_shown_and_answered(page, server):
    server.engine.calls = (("c1", "weather", '{"city":"Oslo","days":[1,2]}'),)
    ask(page)
    answered(page)
    assert page.text(".call p") == "Calls weather"
    assert json.loads(page.text(".call pre")) == {"city": "Oslo", "days": [1, 2]}
    assert page.text(".call pre").startswith('{\n  "city"')
    server.engine.calls = ()
    fill(page, "Result of weather", "rain")
    page.click(".send-results")
    answered(page, 2)
    call, result = server.engine.asked[-1][0][-2:]
    assert call["tool_calls"][0]["function"]["name"] == "weather"
    assert result["role"] == "tool"
    assert (result["tool_call_id"], result["content"]) == ("c1", "rain")


def test_examples_may_be_asked(page, server):
    assert page.evaluate("document.querySelectorAll('#examples button').length") == 3
    text = page.text("#examples button")
    page.click("#examples button")
    answered(page)
    assert server.engine.asked[-1][0] == [{"role": "user", "content": text}]
    assert not page.evaluate("document.querySelector('#examples').checkVisibility()")


def test_a_reload_keeps_the_conversation_and_it_can_be_exported(page, server):
    server.engine.reasoning = "Hm."
    server.engine.calls = (("c1", "weather", '{"city":"Oslo"}'),)
    page.click("#settings-button")
    fill(page, "System prompt", "Be brief.")
    ask(page, "Weather?")
    answered(page)
    reload(page)
    assert page.text(".message.user .body") == "Weather?"
    assert page.text(".answer .body") == "Hello there , friend"
    page.evaluate("document.querySelector('.result textarea').focus()")
    page.type("rain")
    page.click(".send-results")
    server.engine.calls = ()
    answered(page, 2)
    reload(page)
    assert "Result of weather" in page.text(".message.tool")
    page.click(".retry")
    answered(page, 2)
    messages = server.engine.asked[-1][0]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["reasoning"] == "Hm."
    page.evaluate(
        "URL.createObjectURL = (blob) => { window.exported = blob.text(); return 'blob:x'; };"
        "HTMLAnchorElement.prototype.click = function () { window.named = this.download; }"
    )
    page.click("#export-chat")
    exported = json.loads(page.evaluate("window.exported"))
    assert page.evaluate("window.named") == "conversation.json"
    assert exported["model"] == "smollm2"
    assert [m["content"] for m in exported["messages"]][:2] == ["Be brief.", "Weather?"]
    page.click("#new-chat")
    assert page.evaluate("sessionStorage.length") == 0
    reload(page)
    assert page.evaluate("document.querySelectorAll('.message').length") == 0


def test_after_a_reload_only_the_last_entry_asks_for_results(page, server):
    server.engine.calls = (("c1", "weather", '{"city":"Oslo"}'),)
    for count in (1, 2):
        ask(page)
        answered(page, count)
    forms = (
        "[...document.querySelectorAll('.answer')]"
        ".map((n) => n.querySelectorAll('.send-results').length)"
    )
    reload(page)
    assert page.evaluate(forms) == [0, 1]
    server.engine.calls = ()
    page.click(".send-results")
    answered(page, 3)
    roles = [message["role"] for message in server.engine.asked[-1][0]]
    assert roles == ["user", "assistant", "user", "assistant", "tool"]
    ask(page)
    answered(page, 4)
    reload(page)
    assert page.evaluate(forms) == [0] * 4


LATE_CALL = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": "{}"}}
HELD_FETCH = """
(() => {
  const {fetch} = window;
  const chunk = {choices: [{index: 0, delta: {tool_calls: [CALL]}}]};
  window.fetch = async (_, {signal}) => {
    window.fetch = fetch;
    return new Response(new ReadableStream({
      start(stream) {
        stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
        signal.addEventListener("abort", () => stream.error(signal.reason));
      },
    }));
  };
})()
"""


def test_an_answer_that_ends_late_asks_for_no_results(page):
    """The next message is sent before the stopped request has ended."""
    page.evaluate(HELD_FETCH.replace("CALL", json.dumps(LATE_CALL)))
    ask(page)
    page.wait_for("document.querySelector('.call')")
    page.evaluate(
        "document.querySelector('#message').value = 'Never mind';"
        "document.querySelector('#stop').click();"
        "document.querySelector('#send').click()"
    )
    answered(page, 2)
    assert "You stopped it." in page.text(".answer")
    assert page.evaluate("document.querySelectorAll('.send-results').length") == 0


def test_an_export_with_a_wrong_setting_shows_where_it_is(page):
    ask(page)
    answered(page)
    page.click("#settings-button")
    fill(page, "strength", "2")
    page.click("#export-chat")
    page.wait_for("document.activeElement.name === 'strength'")
    assert page.evaluate("document.activeElement.ariaInvalid") == "true"
    assert "strength is 2. Expected: 0 to 1." in page.evaluate(
        "document.querySelector('#announcements').textContent"
    )
    assert page.problems() == []


def reload(page):
    page.evaluate("window.isOld = true")
    page.call("Page.reload")
    page.wait_for("!window.isOld && document.querySelector('#model')?.value === 'smollm2'")


def test_what_is_left_empty_shows_the_models_value(browser):
    class Recommending(FakeEngine):
        def default_sampling_params(self):
            return SamplingParams(temperature=0.2, top_p=0.9)

    with running(Recommending(config=configured())) as server, new_page(browser) as page:
        settings = msgspec.structs.replace(server.service.settings, admin="127.0.0.1:9")
        server.service.settings = settings
        page.open(server.url + "/")
        page.wait_for("!document.querySelector('#live-settings').hidden")
        shown = (
            "[...document.querySelectorAll('#sampling input')].map((n) => [n.name, n.placeholder])"
        )
        values = dict(page.evaluate(shown))
        assert (values["temperature"], values["top_p"]) == ("0.2", "0.9")
        assert values["max_tokens"] == values["seed"] == "default"
        link = "document.querySelector('#live-link').href"
        assert page.evaluate(link) == "http://127.0.0.1:9/"


def test_forms_and_probabilities_of_answers(page, server):
    page.click("#settings-button")
    fill(page, "JSON of this schema", '{"type": "object"}')
    fill(page, "Probabilities of tokens", "shown")
    server.engine.text = "Hello <b>"
    ask(page)
    answered(page)
    _, params, _ = server.engine.asked[-1]
    assert (params.structured.json, params.logprobs) == ({"type": "object"}, 4)
    page.click(".probabilities summary")
    rows = "[...document.querySelectorAll('.probabilities tbody tr')].map((r) => r.innerText)"
    first, second = page.evaluate(rows)
    assert first.split("\t") == ['"Hello"', "61 %", '"other" 22 %']
    assert second.startswith('" <b>"')
    check_nothing_outside(page, server.url)


def test_code_has_colours(page, server):
    code = "def f(x):  # a comment\n    return \"<b>\" + 'x' * 12"
    server.engine.text = f"```python\n{code}\n```"
    ask(page)
    answered(page)
    assert page.text(".answer pre") == code
    parts = (
        "[...document.querySelectorAll('.answer pre span')].map((n) => [n.className, n.innerText])"
    )
    assert page.evaluate(parts) == [
        ["code-word", "def"],
        ["code-comment", "# a comment"],
        ["code-word", "return"],
        ["code-string", '"<b>"'],
        ["code-string", "'x'"],
        ["code-number", "12"],
    ]
    check_accessible(page)


def test_a_phone_has_no_shift_key(page, server):
    assert page.evaluate("document.querySelector('#message-hint').checkVisibility()")
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    page.call(
        "Emulation.setDeviceMetricsOverride",
        **{"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True},
    )
    reload(page)
    assert not page.evaluate("document.querySelector('#message-hint').checkVisibility()")
    ask(page)
    assert server.engine.asked == []
    page.click("#send")
    answered(page)
    assert server.engine.asked[-1][0] == [{"role": "user", "content": "Hello"}]


def test_headings_of_answers_are_below_the_pages_own(page, server):
    server.engine.text = "## A\n\n## B\n\n#### C\n\n> # D\n\n- ## E\n\n###### F"
    ask(page)
    answered(page)
    levels = "[...document.querySelectorAll('.body :is(h2,h3,h4,h5,h6)')].map((n) => n.outerHTML)"
    assert page.evaluate(levels) == [
        "<h3>A</h3>",
        "<h3>B</h3>",
        "<h4>C</h4>",
        "<h3>D</h3>",
        "<h3>E</h3>",
        "<h4>F</h4>",
    ]


def test_what_a_model_writes_stays_text(page, server):
    server.engine.text = server.engine.reasoning = HOSTILE
    server.engine.calls = (("c1", "<b>x</b>", '"<img src=y>"'),)
    ask(page, HOSTILE)
    answered(page)
    tags = page.evaluate(
        "[...new Set([...document.querySelectorAll('#messages *')].map((n) => n.localName))].sort()"
    )
    assert set(tags) <= ALLOWED_TAGS
    links = page.evaluate(
        "[...document.querySelectorAll('#messages a')].map((n) => [n.href, n.rel, n.target])"
    )
    # Pictures are links, too: nothing of them is fetched.
    assert links == [
        [url, "noopener noreferrer", "_blank"]
        for url in ("http://evil.test/pixel.png", "https://evil.test/", "https://good.test/page")
    ]
    check_nothing_outside(page, server.url)


def test_the_browser_enforces_the_policy(page):
    """Were a model's text ever to become markup, nothing would come of it."""
    refused = page.evaluate(
        "(() => { try { document.body.innerHTML = 'x'; } catch (e) { return e.message; } })()"
    )
    assert "TrustedHTML" in refused
    page.evaluate("fetch('http://localhost:9/').catch(() => {})")
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://localhost:9/x'}))")
    page.evaluate("document.body.setAttribute('style', 'color: red')")
    for directive in ("connect-src", "img-src", "style-src"):
        wait_until(lambda part=directive: part in str(page.problems()))


def test_errors_are_shown_as_text(page, server):
    server.engine.error = OverloadedError("256 requests wait, the maximum")
    ask(page)
    text = answered(page)
    assert "256 requests wait, the maximum" in text
    assert re.search(r"Try again in \d+ seconds?\.", text)
    server.engine.error, server.engine.fails_after = RequestError("it went wrong"), 2
    page.click(".retry")
    page.wait_for("document.querySelector('.answer .problem')?.innerText.includes('went wrong')")
    assert page.text(".answer .body") == "Hello there"
    server.engine.fails_after = 0


def test_a_server_that_is_gone_is_shown_as_text(browser):
    with contextlib.ExitStack() as stack:
        with running(FakeEngine(config=configured())) as server:
            page = stack.enter_context(new_page(browser, server.url + "/"))
            page.wait_for("document.querySelector('#model').value")
        ask(page)
        assert "The server cannot be reached." in answered(page)


def test_the_key_is_asked_for_and_stays_in_the_tab(browser):
    engine = FakeEngine(config=configured(), extensions=[("one", bearer("right-key"))])
    with running(engine) as server, new_page(browser, server.url + "/") as page:
        page.wait_for("document.querySelector('#key-dialog').open")
        assert page.evaluate("document.activeElement.id") == "key"
        assert "smollm2" not in page.evaluate("document.documentElement.innerHTML")
        page.type("wrong")
        page.press("Enter", "\r")
        page.wait_for(
            "document.querySelector('#key-dialog').open"
            " && !document.querySelector('#key-refused').hidden"
        )
        page.type("right-key")
        page.press("Enter", "\r")
        page.wait_for("document.querySelector('#model').value === 'smollm2'")
        ask(page)
        assert "Hello there" in answered(page)
        assert not [url for url in page.requested() if "key" in url]
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        assert "right-key" not in page.evaluate("document.documentElement.outerHTML")
        page.click("#settings-button")
        page.click("#forget-key")
        assert page.evaluate("sessionStorage.length") == 0
        with new_page(browser, server.url + "/") as other:
            other.wait_for("document.querySelector('#key-dialog').open")
            other.press("Escape")
            other.wait_for(
                "document.querySelector('#start-problem').innerText.includes('needs a key')"
            )
            other.click("#start-problem button")
            other.wait_for("document.querySelector('#key-dialog').open")


def focused(page):
    return page.evaluate("document.activeElement.id || document.activeElement.textContent")


def test_the_keyboard_is_enough(page, server):
    ask(page)
    answered(page)
    page.evaluate("document.querySelector('a, button, input, select, textarea').focus()")
    order = [focused(page)]
    for _ in range(4):
        page.press("Tab")
        order.append(focused(page))
    assert order[0] == "Skip to the message field"
    assert order[1:] == ["new-chat", "export-chat", "settings-button", "conversation"]
    page.evaluate("document.querySelector('#settings-button').focus()")
    page.press("Enter", "\r")
    assert focused(page) == "settings-heading"
    page.press("Tab")
    assert focused(page) == "close-settings"
    page.press("Escape")
    assert focused(page) == "settings-button"
    assert page.evaluate("document.querySelector('#settings').hidden")
    assert page.evaluate("document.querySelector('#settings-button').ariaExpanded") == "false"


CONTRASTS = """
(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parts(colour).map((p) => p / 255)
      .map((p) => p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at !== null; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((parts(colour)[3] ?? 1) === 1) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() === "" || !node.checkVisibility()) continue;
    const pair = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    count += 1;
    if (ratio < 4.5 && !node.closest(":disabled")) low.push([node.textContent, ratio]);
  }
  return {low, count};
})()
"""

NEED_NAMES = ("button", "textbox", "combobox", "link", "region", "dialog")


def check_accessible(page, fewest=10):
    """Check names, headings, ids and contrast of the page."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    seen = [node for node in nodes if not node["ignored"]]
    assert len(seen) > fewest
    unnamed = [
        node
        for node in seen
        if node["role"]["value"] in NEED_NAMES and not node.get("name", {}).get("value")
    ]
    assert unnamed == []
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].filter((n) => n.checkVisibility())"
        ".map((n) => Number(n.localName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((n) => n.id)")
    assert len(ids) == len(set(ids))
    contrasts = page.evaluate(CONTRASTS)
    assert contrasts["count"] > 5
    assert contrasts["low"] == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 320])
def test_everybody_can_use_the_chat(page, server, width, dark, tmp_path):
    page.resize(width, 800, dark=dark, reduced_motion=True)
    server.engine.text = f"## Title\n\n- `code` **bold**\n\n{'long' * 40} https://good.test/"
    server.engine.reasoning = "Hm."
    server.engine.calls = (("c1", "weather", '{"city":"Oslo"}'),)
    ask(page)
    answered(page)
    page.click(".thinking summary")
    check_accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(tmp_path / "chat.png")
    page.click("#settings-button")
    check_accessible(page, fewest=40)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getAnimations().length") == 0


def test_the_live_view_moves(browser, tmp_path):
    with running_live_view() as (server, _), new_page(browser, server.url + "/") as page:
        page.wait_for("document.querySelectorAll('#requests tr').length === 4")
        first = page.screenshot(tmp_path / "one.png")
        tokens = "Number(document.querySelectorAll('.figure .now')[2].textContent)"
        page.wait_for(f"{tokens} > 0")
        assert page.text("#state") == "Degraded: acme_bias in quarantine"
        rows = page.evaluate(
            "[...document.querySelectorAll('#requests tr')].map((r) => r.innerText)"
        )
        (waiting,) = [row for row in rows if "report" in row]
        assert "needs 12 KV blocks, 3 are free" in waiting
        assert "0 of 1,800" in waiting
        plugin = page.text("#plugins tr")
        assert plugin.startswith("acme_bias")
        assert "logits processors" in page.text("#plugins tr:last-child")
        assert "In quarantine: IndexError in process" in plugin
        assert int(re.search(r"(\d+) %", plugin)[1]) > 0
        assert page.text("#idle-count") == "3 without figures"
        before = page.evaluate("document.querySelector('.figure polyline').getAttribute('points')")
        page.wait_for(
            "document.querySelector('.figure polyline').getAttribute('points').length > "
            f"{len(before)}"
        )
        assert page.screenshot(tmp_path / "two.png") != first
        ends = page.evaluate(
            "(() => { const p = document.querySelector('.figure polyline').points;"
            "return [p[0].x, p[p.length - 1].x]; })()"
        )
        assert ends == [0, 120], "the line is as wide as its card"
        check_nothing_outside(page, server.url)
        check_accessible(page)


@pytest.mark.timing
def test_the_live_view_shows_the_share_of_a_plugin(browser):
    with running_live_view() as (server, _), new_page(browser, server.url + "/") as page:
        page.wait_for("Number(document.querySelectorAll('.figure .now')[2].textContent) > 0")
        share = int(re.search(r"(\d+) %", page.text("#plugins tr"))[1])
        assert 15 <= share <= 35  # 0.3 s of each poll, about a second


def test_the_live_view_rests_when_it_is_hidden(browser):
    with running_live_view() as (server, figures), new_page(browser, server.url + "/") as page:
        page.wait_for("document.querySelectorAll('#requests tr').length === 4")
        page.click("#pause")
        assert page.text("#state") == "Updates are paused"
        rests(page, figures)
        page.click("#pause")
        polls = figures.polls
        wait_until(lambda: figures.polls > polls + 1)
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        rests(page, figures)
        page.evaluate(
            "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
        )
        polls = figures.polls
        wait_until(lambda: figures.polls > polls + 1)


def rests(page, figures):
    """Check that no poll comes for longer than the time between two."""
    page.evaluate("new Promise((resolve) => setTimeout(resolve, 300))")  # one may be on its way
    polls = figures.polls
    page.evaluate("new Promise((resolve) => setTimeout(resolve, 1600))")
    assert figures.polls == polls


def test_the_live_view_asks_for_a_key_again_and_again(browser):
    with running_live_view("k") as (server, _), new_page(browser, server.url + "/") as page:
        for _ in range(3):
            page.wait_for("document.querySelector('#key-dialog').open")
            page.press("Escape")
            page.wait_for("document.querySelector('#problem button')?.disabled === false")
            page.click("#problem button")
        page.wait_for("document.querySelector('#key-dialog').open")
        page.type("k")
        page.press("Enter", "\r")
        page.wait_for("document.querySelectorAll('#requests tr').length === 4")
        assert page.text("#problem") == ""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everybody_can_use_the_live_view(browser, dark):
    with running_live_view("k") as (server, _), new_page(browser, dark=dark, width=320) as page:
        page.open(server.url + "/")
        page.wait_for("document.querySelector('#key-dialog').open")
        page.type("k")
        page.press("Enter", "\r")
        page.wait_for("document.querySelectorAll('#requests tr').length === 4")
        page.evaluate("document.querySelector('#idle').open = true")
        check_accessible(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        tops = page.evaluate(
            "['#requests-heading', '#figures', '#plugins-heading']"
            ".map((name) => document.querySelector(name).getBoundingClientRect().top)"
        )
        assert tops == sorted(tops), "requests come before the figures on a phone"
        assert not [url for url in page.requested() if "?" in url]


def test_a_dead_engine_is_reported(browser):
    with running_live_view() as (server, _), new_page(browser, server.url + "/") as page:
        server.engine.is_running = False
        page.wait_for("document.querySelector('#state').innerText.startsWith('Unavailable')")
        assert page.text("#state") == (
            "Unavailable: the engine is being restarted; send the request again"
        )
        server.engine.is_running = True
        page.wait_for("document.querySelector('#state').innerText.startsWith('Degraded')")


def test_missing_figures_are_reported(browser):
    """As while the engine restarts: its routes answer 503."""
    with running_live_view() as (server, figures), new_page(browser, server.url + "/") as page:
        page.wait_for("document.querySelectorAll('#requests tr').length === 4")
        figures.error = OverloadedError("the engine is being restarted")
        page.wait_for("document.querySelector('#problem').innerText.includes('being restarted')")
        assert page.text("#state") == "No figures"
        figures.error = None
        page.wait_for("document.querySelector('#problem').innerText === ''")
        assert page.text("#state").startswith("Degraded")


@pytest.fixture(scope="module")
def image_server():
    engine = FakeEngine(config=configured(limits={"body_bytes": 200_000}), takes_images=True)
    engine.config = msgspec.structs.replace(
        engine.config, images=ImagesConfig(max_items=2, max_bytes=50_000, max_pixels=10_000)
    )
    with running(engine) as running_server:
        yield running_server


def give(page, event, *files):
    """Paste or drop files, given as (name, type, bytes)."""
    encoded = [(name, type_, base64.b64encode(data).decode()) for name, type_, data in files]
    made = (
        "new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})"
        if event == "paste"
        else "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})"
    )
    page.evaluate(
        f"""(() => {{
          const data = new DataTransfer();
          for (const [name, type, text] of {json.dumps(encoded)}) {{
            const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
            data.items.add(new File([bytes], name, {{type}}));
          }}
          document.querySelector('#message').dispatchEvent({made});
        }})()"""
    )


def attached(page, count):
    page.wait_for(f"document.querySelectorAll('#attached img').length === {count}")


def test_images_are_pasted_dropped_removed_and_sent(browser, image_server, tmp_path):
    first, second = encoded(gradient(40, 30)), encoded(gradient(30, 40), "JPEG")
    for width, height in ((1200, 800), (390, 780)):
        image_server.engine.asked.clear()
        with new_page(browser, image_server.url + "/", width=width, height=height) as page:
            page.wait_for("!document.querySelector('#add-images').hidden")
            give(page, "paste", ("one.png", "image/png", first))
            attached(page, 1)
            give(page, "drop", ("two.jpg", "image/jpeg", second))
            attached(page, 2)
            page.screenshot(tmp_path / f"attached-{width}.png")
            give(page, "drop", ("three.png", "image/png", first))
            page.wait_for("!document.querySelector('#image-problem').hidden")
            assert page.text("#image-problem") == "three.png: a conversation may have 2 images."
            # Everything can be done with the keyboard: the buttons are buttons, with names.
            names = "[...document.querySelectorAll('#attached button')].map((b) => b.ariaLabel)"
            assert page.evaluate(names) == ["Remove one.png", "Remove two.jpg"]
            page.evaluate("document.querySelector('#attached button').focus()")
            page.press("Enter", "\r")
            attached(page, 1)
            assert page.evaluate("document.activeElement.ariaLabel") == "Remove two.jpg"
            assert page.evaluate("document.querySelector('#image-problem').hidden")
            ask(page, "What is this?")
            answered(page)
            (message,) = image_server.engine.asked[-1][0]
            (image, text) = message["content"]
            assert text == {"type": "text", "text": "What is this?"}
            assert image["image_url"]["url"].url == data_url(second, "image/jpeg")
            assert (
                page.evaluate("document.querySelector('.message.user img').alt") == "Image 1 of 1"
            )
            page.evaluate("location.reload()")
            page.wait_for("document.querySelector('.message.user img')")  # the tab keeps it
            assert page.problems() == []


def test_images_above_a_limit_are_not_taken(browser, image_server):
    wrong = [
        (("a.svg", "image/svg+xml", b"<svg/>"), "a.svg: expected a PNG, JPEG, WEBP or GIF image."),
        (("b.png", "image/png", b"no image"), "b.png: this is no image that can be read."),
        (
            ("c.png", "image/png", b"x" * 50_001),
            "c.png: it has 49 KiB, and at most 49 KiB are taken.",
        ),
        (
            ("d.png", "image/png", encoded(gradient(101, 100))),
            "d.png: it has 101 \u00d7 100 pixels, and at most 10000 are taken.",
        ),
    ]
    with new_page(browser, image_server.url + "/") as page:
        page.wait_for("!document.querySelector('#add-images').hidden")
        for file, words in wrong:
            give(page, "paste", file)
            page.wait_for(
                f"document.querySelector('#image-problem').textContent === {json.dumps(words)}"
            )
        assert page.evaluate("document.querySelectorAll('#attached img').length") == 0


def test_without_a_model_that_takes_images_nothing_asks_for_them(page):
    assert page.evaluate("document.querySelector('#add-images').hidden")
    give(page, "paste", ("one.png", "image/png", encoded(gradient())))
    give(page, "drop", ("one.png", "image/png", encoded(gradient())))
    ask(page, "Hello")
    answered(page)
    assert page.evaluate("document.querySelectorAll('img').length") == 0

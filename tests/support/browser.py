"""Headless Chromium, driven through its DevTools protocol over a pipe; no library between."""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from support.waiting import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it may run as root, and opens nothing but our own pages
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-features=Translate,OptimizationHints,MediaRouter",
    "--disable-sync",
    "--metrics-recording-only",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


def executable():
    """Return the path of Chromium.

    Raises:
        FileNotFoundError: there is none.
    """
    named = os.environ.get("CHROMIUM")
    paths = [path for name in ([named] if named else NAMES) if (path := shutil.which(name))]
    if not paths:
        raise FileNotFoundError("no chromium: install it, or name it in the variable CHROMIUM")
    return paths[0]


class Browser:
    """A running Chromium."""

    def __init__(self, process, write_to, read_from):
        self._process, self._write_to, self._read_from = process, write_to, read_from
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._answers, self.events = {}, []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        rest = b""
        while part := os.read(self._read_from, 1 << 16):
            *messages, rest = (rest + part).split(b"\0")
            with self._changed:
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append(message)
                self._changed.notify_all()

    def call(self, method, session=None, **params):
        """Call a method of the protocol; return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers, PATIENCE_S), method
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def close(self):
        """End it, with all its processes."""
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        os.close(self._write_to)
        os.close(self._read_from)


class Page:
    """A tab.

    Attributes:
        session: session of the protocol.
    """

    def __init__(self, browser):
        self._browser = browser
        # A context of its own shares neither storage nor cache with other pages.
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )
        attached = browser.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Audits", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        return self._browser.call(method, self.session, **params)

    def close(self):
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def events(self, *methods):
        """Return the parameters of all events of some methods."""
        return [
            event["params"]
            for event in list(self._browser.events)
            if event.get("sessionId") == self.session and event["method"] in methods
        ]

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression):
        """Return the value of a JavaScript expression, or the result of its promise."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, expression, seconds=PATIENCE_S):
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.evaluate(f"Boolean({expression})"):
                return
            time.sleep(0.03)
        raise AssertionError(f"it never became true: {expression}; {self.text('body')[:2000]}")

    def text(self, selector):
        """Return the visible text of an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector):
        """Click the middle of an element with the mouse."""
        x, y = self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key, text=None, modifiers=0):
        """Press a key."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        down = "keyDown" if text else "rawKeyDown"
        extra = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type=down, modifiers=modifiers, **common, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **common)

    def resize(self, width, height, *, dark=False, reduced_motion=False):
        """Set the size of the window and the user's preferences."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        motion = "reduce" if reduced_motion else "no-preference"
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path):
        """Write a picture of the visible part; return its bytes."""
        picture = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        Path(path).write_bytes(picture)
        return picture

    def requested(self):
        """Return the URLs of all requests."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]

    def problems(self):
        """Return the complaints of the browser: errors, violations, failed loads."""
        entries = [event["entry"] for event in self.events("Log.entryAdded")]
        messages = [
            (e["level"], e["text"], e.get("url")) for e in entries if e["level"] != "verbose"
        ]
        messages += [str(event) for event in self.events("Runtime.exceptionThrown")]
        messages += [
            str(event["issue"])
            for event in self.events("Audits.issueAdded")
            if event["issue"]["code"] == "ContentSecurityPolicyIssue"
        ]
        called = self.events("Runtime.consoleAPICalled")
        return messages + [str(e["args"]) for e in called if e["type"] in ("error", "warning")]


@contextlib.contextmanager
def running_browser():
    """Run Chromium while the body runs."""
    profile = tempfile.mkdtemp(prefix="hardpoint-browser-")
    from_us, to_it = os.pipe()
    from_it, to_us = os.pipe()
    # It reads from descriptor 3 and writes to 4; ours must not be among these two.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (from_us, to_us)]
    try:
        process = _spawn([executable(), *FLAGS, f"--user-data-dir={profile}", "about:blank"], ends)
        for end in (from_us, to_us, *ends):
            os.close(end)
        with contextlib.closing(Browser(process, to_it, from_it)) as browser:
            yield browser
    finally:
        shutil.rmtree(profile, ignore_errors=True)


class _Spawned:
    """A process of `posix_spawn`, with the parts of Popen that Browser needs."""

    def __init__(self, pid):
        self.pid = pid

    def wait(self, seconds):
        deadline = time.monotonic() + seconds
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("chromium", seconds)
            time.sleep(0.02)


def _spawn(command, ends):
    nothing = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, nothing, number) for number in (0, 1, 2)]
    actions += [(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends, 3)]
    try:
        pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions, setpgroup=0)
    finally:
        os.close(nothing)
    return _Spawned(pid)


@contextlib.contextmanager
def new_page(browser, url=None, **size):
    """Open a tab while the body runs."""
    with contextlib.closing(Page(browser)) as page:
        page.resize(**{"width": 1200, "height": 800, **size})
        if url is not None:
            page.open(url)
        yield page

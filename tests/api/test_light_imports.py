"""Modules that the front door must not import: those of the command line and single features."""

from __future__ import annotations

import subprocess
import sys

_RARE = {
    "argcomplete",
    "gguf",
    "jinja2",
    "jsonschema",
    "llguidance",
    "prompt_toolkit",
    "regex",
    "rich",
    "starlette",
    "tokenizers",
    "transformers",
    "uvicorn",
}


def test_the_classes_import_no_library_of_the_command_line_or_of_a_feature():
    code = (
        "import sys, hardpoint; hardpoint.LLM, hardpoint.AsyncLLM, hardpoint.LLMEngine; "
        f"print(sorted({_RARE!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    import hardpoint.progress as progress

    class Terminal:
        """Standard error of a terminal."""

        def __init__(self):
            self.written = ""

        def isatty(self):
            return True

        def write(self, text):
            self.written += text

        def flush(self):
            pass

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "hardpoint.progress_bars", None)
    monkeypatch.setattr(progress, "_SECONDS_PER_LINE", 0.0)
    with progress.ProgressDisplay(enabled=True) as display:
        display.report("Loading", 1, 2)
        display.report("Loading", 2, 2, "done")
    assert terminal.written == "Loading: 1/2\nLoading: 2/2, done\n"

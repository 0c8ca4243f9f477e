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

"""Modules that a program must not import without a use for them."""

from __future__ import annotations

import subprocess
import sys

from support.processes import ROOT
from support.source_tree import PACKAGE

from hardpoint.testing import scripted_config

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


def test_an_engine_in_this_process_imports_no_module_of_deployment(scripted):
    ways = {
        f"hardpoint.{link.name}"
        for link in PACKAGE.iterdir()
        if link.resolve().parent == ROOT / "deployment"
    }
    assert {"hardpoint.process", "hardpoint.replicas", "hardpoint.journal"} <= ways
    code = (
        "import sys; from hardpoint import LLM\n"
        f"with LLM(config={scripted_config(scripted)!r}) as llm:\n"
        "    text = llm.generate('say abc')[0].outputs[0].text\n"
        "from pathlib import Path; from hardpoint.testing import scripted_engine\n"
        f"scripted_engine(Path({str(scripted)!r})).close()\n"
        f"print(bool(text), sorted({ways!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "True []", done.stdout

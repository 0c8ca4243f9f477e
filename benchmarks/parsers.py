# ruff: noqa: RUF001 - the markers of DeepSeek are written so
"""Microseconds of each built-in output parser per token.

    python benchmarks/parsers.py [--rounds 5] [--json FILE]

An output of about 4000 tokens is fed token by token, as the demo model's tokenizer divides it: half
of it reasoning or content, half of it the arguments of one call. Markers that models have as
special tokens are fed as such. Printed are medians of processor time, guards included.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.host.boundary.text_guards import open_parser
from hardpoint.host.registry.model_files import find_files
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.plugins import EngineConfig, ParserRequest, TokenizerContext
from hardpoint.toolkit.parsing.format_parser import FormatParser

PROSE = (
    "Once upon a time, in a village between two rivers, there lived a clockmaker who built a new "
    "clock every winter: small ones of pear wood, tall ones with brass moons. "
) * 60
ARGUMENTS = json.dumps({"title": "Clocks", "text": PROSE[:7000], "years": list(range(300))})
CALL = f'{{"name": "save", "arguments": {ARGUMENTS}}}'
PYTHON = f"[save(title='Clocks', text={PROSE[:7000]!r}, years={list(range(300))})]"
PARAMETERS = f"<function=save>\n<parameter=text>\n{PROSE}\n</parameter>\n</function>\n"
OUTPUTS = {
    "think_tags": f"<think>{PROSE}</think>{PROSE}",
    "hermes": f"{PROSE}<tool_call>{CALL}</tool_call>",
    "json": CALL,
    "llama3_json": CALL,
    "pythonic": PYTHON,
    "llama4_pythonic": f"<|python_start|>{PYTHON}<|python_end|>",
    "mistral": f"[THINK]{PROSE}[/THINK][TOOL_CALLS]save[ARGS]{ARGUMENTS}",
    "granite": f"<think>{PROSE}</think><tool_call>{CALL}</tool_call>",
    "granite_3_2": f"Here is my thought process:{PROSE}<|tool_call|>[{CALL}]",
    "gemma": f"<|channel>thought\n{PROSE}<channel|>{PROSE}",
    "seed_oss": f"<seed:think>{PROSE}</seed:think><seed:tool_call>{PARAMETERS}</seed:tool_call>",
    "qwen3_coder": f"{PROSE}<tool_call>{PARAMETERS}</tool_call>",
    "harmony": (
        f"<|channel|>analysis<|message|>{PROSE}<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.save<|message|>{ARGUMENTS}<|call|>"
    ),
    "kimi_k2": (
        f"{PROSE}<|tool_calls_section_begin|><|tool_call_begin|>functions.save:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek_v3": (
        f"{PROSE}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>save\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_1": (
        f"{PROSE}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>save<｜tool▁sep｜>{ARGUMENTS}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}


class WithMarkers(TransformersTokenizer):
    """The demo model's tokenizer, with the special tokens that a format needs."""

    contract = 1
    markers: Mapping[str, int] = {}

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The markers."""
        return self.markers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plugins = resolve_plugins(EngineConfig())
    entry = plugins.one("tokenizers")
    demo: Any = plugins.create(entry, TokenizerContext, files=find_files("smollm2"))
    tokenizer = WithMarkers(demo.context)
    found = {}
    for name, text in OUTPUTS.items():
        found[name] = measure(plugins, tokenizer, name, text, options.rounds)
        print(f"{name:16} {found[name]:5.2f} us per token", flush=True)
    print(f"slowest: {max(found.values()):.2f} (aim: under 3)")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


def measure(plugins: PluginSet, tokenizer: WithMarkers, name: str, text: str, rounds: int) -> float:
    """Return the microseconds of a parser per token of a text."""
    kinds = ("reasoning_parsers", "tool_parsers")
    entry = next(found for kind in kinds if (found := plugins.find(kind, name)) is not None)
    cls = plugins.target(entry)
    assert issubclass(cls, FormatParser)
    tokenizer.markers = {token: (1 << 19) + i for i, token in enumerate(cls.required_tokens)}
    parser = open_parser(plugins, entry, tokenizer, 1 << 20)
    texts = {token: marker for marker, token in tokenizer.markers.items()}
    pieces: list[str | int] = []
    pattern = "|".join(map(re.escape, tokenizer.markers)) or "(?!)"
    for part in re.split(f"({pattern})", text):
        if part in tokenizer.markers:
            pieces.append(tokenizer.markers[part])
        else:
            stream = tokenizer.decode_stream([])
            ids = tokenizer.encode(part, add_special_tokens=False)
            pieces += [piece for token in ids if (piece := stream.step(token))]
    seconds = []
    for _ in range(rounds):
        state = parser.open(ParserRequest())
        start = time.thread_time()
        for piece in pieces:
            if isinstance(piece, int):
                state.feed_token(piece, texts[piece])
            else:
                state.feed(piece)
        state.finish()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds) / len(pieces) * 1e6


if __name__ == "__main__":
    main()

"""xgrammar, vLLM's default grammar backend, as benchmarks/grammars.py asks for it.

    python grammars_peer.py < QUESTION

It runs in the environment of xgrammar, and imports nothing of Hardpoint. Read is one JSON object;
the answer is the last line of the output.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import sys
import time
from typing import Any


def timed(call: Any) -> float:
    """Return the microseconds of this thread that a call takes."""
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e6


def compiled(compiler: Any, structured: dict[str, Any]) -> Any:
    """Return a compiled grammar."""
    import xgrammar

    if "json" in structured:
        return compiler.compile_json_schema(structured["json"])
    if "json_object" in structured:
        return compiler.compile_json_schema({"type": "object"})
    if "regex" in structured:
        return compiler.compile_regex(structured["regex"])
    if "choice" in structured:
        texts = " | ".join(json.dumps(text) for text in structured["choice"])
        return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(f"root ::= {texts}"))
    return compiler.compile_structural_tag(structured["structural_tag"])


def measure(grammar: Any, texts: list[list[int]], rows: int, rounds: int, size: int) -> Any:
    """Return the microseconds of a row's mask in each step, and of following a token."""
    import xgrammar

    matchers = [xgrammar.GrammarMatcher(grammar) for _ in range(rows)]
    left = [iter(texts[row % len(texts)]) for row in range(rows)]
    masks = xgrammar.allocate_token_bitmask(rows, size)
    for row, matcher in enumerate(matchers):
        for _ in range(row * 7 % len(texts[row % len(texts)])):
            assert matcher.accept_token(next(left[row]))
    fills, advances, tokens = [], [], [0] * rows

    def fill() -> None:
        for row, matcher in enumerate(matchers):
            matcher.fill_next_token_bitmask(masks, row)

    def advance() -> None:
        for matcher, token in zip(matchers, tokens, strict=True):
            assert matcher.accept_token(token)

    for _ in range(rounds):
        fills.append(timed(fill))
        for row in range(rows):
            if (token := next(left[row], None)) is None:
                matchers[row].reset()
                left[row] = iter(texts[row % len(texts)])
                token = next(left[row])
            tokens[row] = token
        advances.append(timed(advance))
    return {
        "rows": rows,
        "fill": [value / rows for value in fills],
        "advance": [value / rows for value in advances],
    }


def compile_times(vocabulary: Any, schemas: list[Any]) -> dict[str, Any]:
    """Return the milliseconds to compile schemas up to the first mask, and again."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1)
    masks = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)

    def ready(structured: dict[str, Any]) -> None:
        matcher = xgrammar.GrammarMatcher(compiled(compiler, structured))
        matcher.fill_next_token_bitmask(masks, 0)

    found: dict[str, Any] = {}
    for when in ("first", "cached"):
        found[when] = []
        for schema in schemas:
            start = time.perf_counter()
            ready({"json": schema})
            found[when].append((time.perf_counter() - start) * 1e3)
    return found


def main() -> None:
    """Answer the question on standard input."""
    import xgrammar

    question = json.load(sys.stdin)
    answer: dict[str, Any] = {"version": importlib.metadata.version("xgrammar")}
    masks: dict[str, Any] = {}
    compiling: dict[str, Any] = {}
    for name, tokens in question["vocabularies"].items():
        encoded = [base64.b64decode(token) for token in tokens]

        def known(encoded: list[bytes] = encoded) -> Any:
            return xgrammar.TokenizerInfo(encoded, vocab_size=len(encoded), stop_token_ids=[2])

        vocabulary = known()
        milliseconds = timed(known) / 1e3
        masks[name] = {}
        compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1)
        for load, given in question["loads"].items():
            grammar = compiled(compiler, given["structured"])
            masks[name][load] = [
                measure(grammar, given["texts"], rows, question["rounds"], len(encoded))
                for rows in question["batches"]
            ]
        compiling[name] = compile_times(vocabulary, question["schemas"])
        compiling[name]["vocabulary"] = milliseconds
    print(json.dumps({**answer, "masks": masks, "compile": compiling}))


if __name__ == "__main__":
    main()

"""Check that code, prose and commit subjects use the field's words; exit 1 if anything does not.

scripts/vocabulary                 checks the package, docs, examples, benchmarks, the figures of
                                   language.py, and commit subjects since the merge base with main
scripts/vocabulary core/client     checks one folder or file

Looked at are identifiers (definitions, parameters, variables, attributes that the file assigns),
docstrings, comments, other string literals, and Markdown. Identifiers, docstrings and comments of
the folders in CHECKED_STYLE are also checked for ellipsis and for code that speaks.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path

import language
from syntax import literals, statements, without_literals

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("src", "core", "host", "plugins", "builtin_plugins", "deployment")
CHECKED = (*PACKAGE, "examples", "benchmarks", "docs", "README.md")
GENERATED = ROOT / "docs" / "reference"
"""Pages that scripts/reference writes; git ignores them, so their sentences are not counted."""
CHECKED_STYLE = (*PACKAGE, "benchmarks", "examples", "kernels", "tests")
"""Folders and files that keep STYLE, STYLE_OPENINGS and STYLE_NAMES, too.

A folder joins once it is clean: docstrings that name things, and code that does not speak.
"""

IDENTIFIERS = {
    "Books": "RequestTracker",
    "Relay": "EventLoopBridge",
    "Turns": "SendQueue",
    "Inbox": "OutputQueue",
    "Outbox": "ClientSendQueues",
    "Outgoing": "ZmqSender",
    "InputLine": "DealerConnection",
    "MergedOutputs": "OutputCoalescer",
    "absorb": "merge_into",
    "Taken": "ProcessedBatch",
    "take": "process_outputs, pop, read, ...",
    "took": "record_output",
    "Surroundings": "PausedSteps",
    "Pausing": "PauseController",
    "guilty": "responsible_plugin",
    "blamed": "attribute_error",
    "find_culprit": "find_unpicklable",
    "ReadyMade": "PrebuiltRequestValidator",
    "ReceivedHook": "RequestReceivedHook",
    "patience": "utility_timeout",
    "UNHURRIED": "NO_TIMEOUT",
    "Share": "ActiveRows",
    "row_is_sound": "row_is_finite",
    "spoilt": "bad_rows",
    "Seat": "RequestProcessor",
    "Answers": "ResultCache",
    "Foreign": "ExternalProcessor",
    "Form": "CallSignature",
    "Found": "InstalledPlugin",
    "Chosen": "SelectedPlugin",
    "by_value": "main_pickle",
    "struct_parts": "struct_pickle",
    "Origins": "ConfigSources",
    "unblock": "poll_blocked",
    "lingering": "pending_free",
    "untold": "unreported_finished",
    "unfreed": "pending_free",
    "Desk": "BatchFixture",
    "desk": "batch",
    "Rig": "SchedulerSimulator",
    "rig": "simulator",
    "Roll": "RequestLedger",
    "roll": "ledger",
    "Life": "ExpectedRequest",
    "life": "expected",
    "lives": "requests",
    "standing": "invariants, state",
    "books": "tracker",
    "words": "message",
    "told": "reported, notified",
    "tell": "notify, report",
    "heard": "received",
    "deaf": "eof",
    "telling": "notify_lock",
    "nobody": "no caller, none",
    "anew": "again",
    "beside": "besides, alongside",
    "behind": "after",
    "there": "current, present",
    "most": "limit",
    "often": "count",
    "who": "request, plugin",
    "whom": "request",
    "whose": "owner",
    "each": "item",
}
"""Banned identifiers, as whole names and as `_`-separated or CamelCase parts of names."""

WHOLE_ONLY = {
    "Stage": "ProcessorRunner",
    "take": "process_outputs, pop, read, ...",
    "took": "record_output",
    "most": "limit",
    "there": "current",
    "who": "request",
    "each": "item",
    "often": "count",
    "_own": "_copy",
    "_shown": "_dispatch",
    "_alone": "_single_row",
    "_run_apart": "_run_per_row",
    "_lie_down": "_release_memory",
    "_TOLD_ONCE": "_SET_ONCE",
    "_GLANCE_S": "_POLL_INTERVAL_S",
    "_NEWS_S": "_DEATH_NOTICE_S",
}
"""Banned only as whole names: `at_most` and `take_draft_token_ids` say something."""

PROSE = {
    r"\btold\b": "reported, notified",
    r"\bbooks\b": "tracker, accounting",
    r"\bwords\b": "message, text, reason, strings",
    r"\btells?\b": "notify, report, show, distinguish",
    r"\b(hears?|heard)\b": "receive, received",
    r"\b(untold|unfreed)\b": "unreported, pending",
    r"\bspoil(t|s)?\b": "corrupt, bad",
    r"\bguilty\b": "responsible",
    r"\bculprits?\b": "responsible plugin, cause",
    r"\banew\b": "again",
    r"\bwho(m|se)?ever\b": "the caller, any request",
    r"\bnobody\b": "no one, no caller, nothing",
    r"\btake it that\b": "state the action",
    r"\bstand(s|ing)? still\b": "pause",
    r"\blie down\b": "sleep",
    r"\bbeside\b": "next to, in addition to",
    r"\bmeanwhile\b": "in the meantime, during",
    r"\bhas? it that\b": "state the action",
    r"\bwhat (became|becomes) of\b": "the result of",
    r"\bin the open\b": "reported",
    r"\bthose who\b": "requests that, callers that",
    r"\bone who\b": "the caller",
    r"\bof its own accord\b": "by itself",
    r"\bgives? back\b": "release, free, return",
    r"\bgiven back\b": "released, freed, returned",
}
"""Banned in docstrings, comments, messages and Markdown, in any case."""
ANY_PROSE = re.compile("|".join(PROSE))
"""Any of them in a text in small letters."""

EXEMPT = {"bad_words", "bad_words_token_ids", "BadWords", "PluginNotFoundError"}
"""Identifiers that say what they mean: the field's own parameter, and an English phrase."""

OPENINGS = {
    r"^Have\b": "state the action",
    r"^Prepare\.$": "state what is created",
    r"^Take it that\b": "state the action",
    r"^Whether\b": "Return whether",
}
"""Banned at the start of a docstring of a function; that of a property may begin `Whether`."""

_BECAUSE = (
    r", for (?:(?!(?:that|which|who|whose|whom|if|each|example|instance)\b)[\w`.'-]+ ){1,4}"
    r"(?:is|are|was|were|has|have|had|can|cannot|may|must|would|will|do|does|did)\b"
)
_ELLIPSIS = (
    r"^\s+`?\w+`?(?:, `?\w+`?)*(?: and `?\w+`?)?: "
    r"(?:of|that|which (?:has|have|is|are|was|may|can|this))\b"
)
STYLE = {
    _ELLIPSIS: "name the thing, `names: names of the route.`",
    r"\b(?:say|says|said|saying)\b": "report, describe, state, give",
    r"(?<!there )\b(?:is|are) none\b(?! of\b)": "name what is missing or wrong",
    r"\bunheeded\b": "ignored",
    r"\bin vain\b": "without success, unused",
    _BECAUSE: "because",
}
"""Banned in lines of docstrings and comments."""

STYLE_OPENINGS = {
    r"^What\b": "name it, `Inputs of a worker.`",
    r"^Return what\b": "Return the ...",
}
"""Banned at the start of a docstring of a module, class or function."""

STYLE_NAMES = {"say", "says", "said", "saying", "unsaid"}
"""Banned as `_`-separated parts of names."""

ANY_STYLE = re.compile("|".join(STYLE), re.MULTILINE)
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    """Print each violation as `path:line: message`; return the exit code."""
    gc.disable()  # each collection would visit the trees, which takes longer than the rest
    places = [Path(argument).resolve() for argument in sys.argv[1:]]
    checked = set(files(places or [ROOT / name for name in CHECKED]))
    styled = {
        path for path in files([ROOT / name for name in CHECKED_STYLE]) if path.suffix != ".md"
    }
    if places:
        styled &= checked
    problems = []
    counts = language.Counts()
    for path in sorted(checked | styled):
        text = path.read_text(encoding="utf-8")
        messages = list(violations(path)) if path in checked else []
        if path in styled:
            messages += style(text)
        if path in checked:
            count(path, text, counts)
        problems += [f"{path.relative_to(ROOT)}:{line}: {message}" for line, message in messages]
    if not places:
        problems += language.report(counts.values(), language.settings(ROOT))
        problems += language.commit_problems(ROOT)
    print("\n".join(problems) or "vocabulary: nothing to change")
    return 1 if problems else 0


def count(path: Path, text: str, counts: language.Counts) -> None:
    """Add the docstrings, names, messages or sentences of a file to the counts."""
    if path.suffix == ".md":
        if GENERATED not in path.parents:
            counts.add_page(text)
        return
    counts.add_heads(first for _, first, _ in docstrings(text))
    counts.add_messages((literal for _, literal in literals(text)), ANY_STYLE)
    if not words(text).isdisjoint(language.UNSPECIFIC_NAMES):
        counts.names += language.unspecific_names(tree(text), text)


def files(places: list[Path]) -> Iterator[Path]:
    """Yield the Python and Markdown files at or below the places, without built packages."""
    for place in places:
        below = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (
            path
            for path in below
            if path.suffix in (".py", ".md") and "build" not in path.relative_to(place).parts
        )


def violations(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and message of each violation in a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from prose(text, 1, code_blocks=False)
        return
    yield from sorted(set(defined_names(text, banned)))
    if ANY_PROSE.search(text.lower()):
        for line, literal in literals(text):
            yield from prose(literal, line)
    for line, first, node in docstrings(text):
        for pattern, instead in OPENINGS.items():
            if not isinstance(node, FUNCTIONS) or not re.search(pattern, first):
                continue
            is_property = any(ast.unparse(mark) == "property" for mark in node.decorator_list)
            if not (is_property and "Whether" in pattern):
                yield line, f"docstring {first!r}: {instead}"


def style(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and message of each ellipsis and of each thing that speaks."""
    described = sorted(described_lines(text).items())
    if ANY_STYLE.search("\n".join(row for _, row in described)):
        for line, row in described:
            for pattern, instead in STYLE.items():
                for match in re.finditer(pattern, row):
                    yield line, f"{match[0].strip()!r}: {instead}"
    for line, first, _ in docstrings(text):
        for pattern, instead in STYLE_OPENINGS.items():
            if re.search(pattern, first):
                yield line, f"docstring {first!r}: {instead}"
    yield from defined_names(text, spoken)


@lru_cache(maxsize=1)
def tree(text: str) -> ast.Module:
    """Return the syntax tree of a module; both checks of a file read it."""
    return ast.parse(text)


@lru_cache(maxsize=1)
def nodes(text: str) -> list[ast.AST]:
    """Return the module and the statements of a text."""
    return list(statements(tree(text)))


@lru_cache(maxsize=1)
def docstrings(text: str) -> list[tuple[int, str, ast.AST]]:
    """Return the line, the first line of the docstring, and the node of each definition."""
    return [
        (getattr(node, "lineno", 1), (ast.get_docstring(node) or "").split("\n")[0], node)
        for node in nodes(text)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def described_lines(text: str) -> dict[int, str]:
    """Return the lines of the docstrings and comments of a module by number."""
    rows = text.split("\n")
    lines = {line: literal for line, literal in literals(text) if literal.startswith("#")}
    for node in nodes(text):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                lines |= {line: rows[line - 1] for line in span}
    return lines


def defined_names(text: str, problem: Callable[[str], str]) -> Iterator[tuple[int, str]]:
    """Yield line number and message of each name that a module defines and that has a problem."""
    if any(map(problem, words(text))):
        for node in ast.walk(tree(text)):
            for name in names(node):
                if message := problem(name):
                    yield getattr(node, "lineno", 1), f"name {name!r}: {message}"


@lru_cache(maxsize=1)
def words(text: str) -> set[str]:
    """Return the words of a module outside comments and strings."""
    return set(re.findall(r"\w+", without_literals(text)))


@cache
def banned(name: str) -> str:
    """Return the replacement of a banned name; empty for any other."""
    plain = name.strip("_")
    if plain in EXEMPT:
        return ""
    if whole := {name, plain} & WHOLE_ONLY.keys():
        return WHOLE_ONLY[min(whole)]
    parts = [*re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name), plain]
    instead = (IDENTIFIERS[part] for part in parts if part in IDENTIFIERS.keys() - WHOLE_ONLY)
    return next(instead, "")


@cache
def spoken(name: str) -> str:
    """Return the replacement of a name that speaks; empty for any other."""
    is_spoken = not STYLE_NAMES.isdisjoint(name.strip("_").split("_"))
    return "report, message, description" if is_spoken else ""


def names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines or assigns."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.arg():
            yield node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.attr
        case ast.alias(asname=str(asname)):
            yield asname
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            yield name
        case _:
            pass


def prose(text: str, line: int, *, code_blocks: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the banned words of a text that starts at a line."""
    if not ANY_PROSE.search(text.lower()):
        return
    in_code = False
    for offset, row in enumerate(text.split("\n")):
        if row.lstrip().startswith("```"):
            in_code = not in_code
        if in_code and not code_blocks:
            continue
        for pattern, instead in PROSE.items():
            for match in re.finditer(pattern, row, re.IGNORECASE):
                yield line + offset, f"{match[0]!r}: {instead}"


if __name__ == "__main__":
    sys.exit(main())

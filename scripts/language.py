"""Figures of plain language in docstrings, names, messages and pages, and commit subjects.

scripts/vocabulary prints the figures and compares them with `tool.hardpoint.language` of
pyproject.toml. Issues lower these limits; nothing raises them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RELATIVE = re.compile(r"\b(?:what|of which|of whom|whose|those|that of|one that)\b", re.IGNORECASE)
"""Words of a relative clause that replaces a noun."""

UNSPECIFIC_NAMES = frozenset(
    {"asked", "found", "given", "handed", "kept", "one", "own", "what"},
)
"""Names of variables and parameters that do not describe the value."""

UNSPECIFIC_NAME = re.compile(rf"\b(?:{'|'.join(sorted(UNSPECIFIC_NAMES))})\b")

SENTENCE_WORDS = 30
"""Most words of a sentence in a page."""

SUBJECT_LENGTH = 72
"""Most characters of a commit subject."""

FIGURES = {
    "relative-docstrings": ("% of docstring heads with what, whose, those, of which, ...", 2),
    "unspecific-names": ("variables and parameters named found, given, one, ...", 50),
    "unclear-messages": ("% of messages with such words, or a habit of STYLE", 2),
    "long-sentences": (f"% of sentences in pages over {SENTENCE_WORDS} words", 3),
}
"""Title and goal of each figure, by the name of its limit."""

VERBS = frozenset(
    """
    Abort Accept Account Adapt Add Address Adjust Align Allow Annotate Answer Append Apply Ask
    Assert Assign Attach Avoid Balance Batch Begin Benchmark Bind Block Bound Break Bring
    Buffer Build Bump Cache Calculate Calibrate Call Cancel Cap Capture Catch Change Check
    Choose Clamp Clarify Clean Clear Clone Close Collapse Collect Combine Compare Compile
    Complete Compress Compute Configure Confirm Connect Consolidate Construct Convert Copy
    Correct Count Cover Create Cut Deactivate Deal Declare Decode Decouple Deduplicate Defer
    Define Delay Delegate Delete Deprecate Derive Describe Detect Disable Discard Dispatch
    Display Divide Do Document Draft Drain Draw Drop Dump Edit Embed Emit Enable Encode End
    Enforce Ensure Estimate Evaluate Evict Exclude Execute Exempt Exit Expand Expect Explain
    Export Expose Extend Extract Fail Favor Fetch Fill Filter Find Finish Fix Flatten Flush Fold
    Follow Forbid Force Fork Format Forward Free Freeze Gather Generalize Generate Get Give Go
    Group Guard Halve Handle Hash Hide Hold Honor Ignore Implement Import Improve Include
    Increase Indent Infer Inherit Initialize Inline Insert Inspect Install Instrument
    Interpolate Introduce Invalidate Invert Isolate Iterate Join Keep Launch Leave Let Lift
    Limit Link Lint List Load Localize Lock Log Look Lower Make Map Mark Match Measure Mend
    Merge Migrate Mirror Mock Modernize Move Name Narrow Normalize Note Notify Observe Omit
    Open Optimize Order Organize Overlap Override Pack Parallelize Parametrize Parse Pass Patch
    Pause Permit Pin Place Plan Point Poll Pool Port Prefer Prefetch Prefix Prepare Preserve Prevent
    Print Process Profile Prohibit Promote Propagate Protect Prove Provide Prune Publish Pull
    Push Put Quantize Query Queue Quote Raise Reach Read Rearrange Rebuild Recognize Record
    Recover Redirect Reduce Refactor Reference Refine Refresh Refuse Register Reject Relax
    Release Reload Remove Rename Render Reorder Reorganize Replace Replay Report Request
    Require Rerun Reserve Reset Resolve Respect Restart Restore Restrict Resume Retain Rethrow
    Retry Return Reuse Revert Review Revise Reword Rework Rewrite Route Run Sample Sanitize
    Save Say Scale Schedule Scope Search Select Send Separate Serialize Serve Set Shard Share Ship
    Shorten Show Shrink Shuffle Silence Simplify Simulate Skip Sort Specialize Specify Speed Spell
    Split Stabilize Stage Standardize Start State Stop Store Stream Strengthen Strip Structure
    Submit Subscribe Substitute Suggest Support Suppress Suspend Swap Switch Synchronize Tag
    Take Teach Test Throttle Tidy Tighten Time Toggle Tokenize Trace Track Train Translate
    Treat Trim Truncate Try Tune Turn Type Unify Unload Unpack Unpin Untangle Update Upgrade
    Use Validate Vendor Verify Wait Walk Wake Warm Warn Watch Weaken Widen Wire Wrap Write Yield
    """.split()  # noqa: SIM905
)
"""Imperatives that begin a commit subject."""


@dataclass
class Counts:
    """Numbers of docstring heads, names, messages and sentences."""

    heads: int = 0
    relative_heads: int = 0
    names: int = 0
    messages: int = 0
    unclear_messages: int = 0
    sentences: int = 0
    long_sentences: int = 0

    def values(self) -> dict[str, float]:
        """Return the ratios, by the names of their limits."""
        return {
            "relative-docstrings": percent(self.relative_heads, self.heads),
            "unspecific-names": self.names,
            "unclear-messages": percent(self.unclear_messages, self.messages),
            "long-sentences": percent(self.long_sentences, self.sentences),
        }

    def add_heads(self, heads: Iterable[str]) -> None:
        """Count first lines of docstrings."""
        for head in filter(None, heads):
            self.heads += 1
            self.relative_heads += bool(RELATIVE.search(head))

    def add_messages(self, literals: Iterable[str], style: re.Pattern[str]) -> None:
        """Count the messages among comments and strings that match RELATIVE or a style."""
        for literal in filter(is_message, literals):
            self.messages += 1
            self.unclear_messages += bool(RELATIVE.search(literal) or style.search(literal))

    def add_page(self, text: str) -> None:
        """Count the sentences of a Markdown page."""
        for sentence in sentences(text):
            self.sentences += 1
            self.long_sentences += len(sentence.split()) > SENTENCE_WORDS


def percent(part: int, whole: int) -> float:
    """Return the percentage, rounded to two digits."""
    return round(100 * part / whole, 2) if whole else 0.0


def is_message(literal: str) -> bool:
    """Return whether a comment or string is a text of errors, logs or help (four words or more)."""
    return not literal.startswith(("#", '"""', "'''")) and literal.count(" ") >= 3


def unspecific_names(tree: ast.Module, text: str) -> int:
    """Return how many variables and parameters of a module have an unspecific name."""
    rows = [n for n, row in enumerate(text.split("\n"), 1) if UNSPECIFIC_NAME.search(row)]
    names = 0
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names += name in UNSPECIFIC_NAMES
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                names += name in UNSPECIFIC_NAMES
            case _:
                pass
        nodes += (child for child in ast.iter_child_nodes(node) if has_row(child, rows))
    return names


def has_row(node: ast.AST, rows: list[int]) -> bool:
    """Return whether a node has one of the rows, which are sorted, or no position."""
    first = getattr(node, "lineno", None)
    if first is None:
        return True
    index = bisect_left(rows, first)
    return index < len(rows) and rows[index] <= node.end_lineno  # type: ignore[attr-defined]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a Markdown page without its code, tables and headings.

    A span of code counts as one word, and a link as its text.
    """
    text = re.sub(r"^\s*(```|~~~).*?^\s*\1[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*(?:\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[-*+]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])[)\"*_]*\s+(?=\S)", paragraph.strip()):
            if re.search(r"\w", sentence):
                yield sentence


def settings(root: Path) -> dict[str, Any]:
    """Return the table of the limits, and of the commits with an unchecked subject."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)["tool"]["hardpoint"]["language"]
    return table


def report(values: dict[str, float], limits: Mapping[str, float]) -> list[str]:
    """Print goal, limit and value of each figure; return a message for each above its limit."""
    width = max(len(title) for title, _ in FIGURES.values())
    print(f"{'':{width}} {'goal':>7} {'limit':>7} {'now':>7}")
    for name, (title, goal) in FIGURES.items():
        print(f"{title:{width}} {goal:>7} {limits[name]:>7} {values[name]:>7}")
    return [
        f"{name}: expected at most {limits[name]}, got {values[name]}; reword your additions"
        for name in FIGURES
        if values[name] > limits[name]
    ]


def subject_problems(subject: str) -> Iterator[str]:
    """Yield a message for each rule that the subject of a commit breaks."""
    if len(subject) > SUBJECT_LENGTH:
        yield f"expected at most {SUBJECT_LENGTH} characters, got {len(subject)}"
    verb = subject.split(" ")[0]
    if verb not in VERBS:
        yield f"expected a verb first, got {verb!r}; add a missing one to VERBS of language.py"


def commit_problems(root: Path) -> list[str]:
    """Return a message for each bad subject since the merge base with main, merges apart."""
    bases = [
        name for name in ("main", "origin/main") if git(root, "rev-parse", "-q", "--verify", name)
    ]
    base = git(root, "merge-base", bases[0], "HEAD").strip() if bases else ""
    if not base:
        print("commit subjects: not checked, because this is no clone with a branch main")
        return []
    log = git(root, "log", "--no-merges", "--format=%H %s", f"{base}..HEAD").splitlines()
    exempt = tuple(settings(root)["commits"])
    return [
        f"commit {line[:9]}: {subject!r}: {problem}"
        for line in log
        if not line.startswith(exempt)
        for subject in [line.split(" ", 1)[1]]
        for problem in subject_problems(subject)
    ]


def git(root: Path, *arguments: str) -> str:
    """Return the output of a git command; nothing if it fails or git is not installed."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""

"""The checks of scripts/vocabulary find what they are there for, and nothing else."""

import ast
import importlib
import subprocess

import pytest
from support.processes import ROOT


@pytest.fixture(scope="module")
def vocabulary():
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return importlib.import_module("vocabulary")


def function(*lines):
    """Return a module with a function whose docstring has these lines."""
    text = "\n    ".join(lines)
    return f'def function():\n    """{text}\n    """\n'


@pytest.mark.parametrize(
    "text",
    [
        function("Read.", "", "Args:", "    names: of the route."),
        function("Read.", "", "Args:", "    low, high: of the range."),
        function("Read.", "", "Raises:", "    ValueError: that cannot be read."),
        function("Read.", "", "Args:", "    parts: which are contiguous."),
        function("Fail; the message says why."),
        function("Return what a worker needs."),
        function("What a worker needs."),
        function("Read.", "", "Raises:", "    ValueError: it is none."),
        function("Read; those that are none are left out."),
        function("Wait for the end, for a request has got its answer."),
        function("Wait for a reply in vain."),
        function("Go on unheeded."),
        "# the file says how\n",
        '"""What a worker is built from."""\n',
        'LIMIT = 1\n"""As many as the file says."""\n',
        "said = 1\n",
        "def what_is_said(): ...\n",
    ],
)
def test_each_habit_is_found(vocabulary, text):
    assert list(vocabulary.style(text))


@pytest.mark.parametrize(
    "text",
    [
        function("Read.", "", "Args:", "    names: names of the route."),
        function("Read.", "", "Args:", "    path: path that is read, for messages."),
        function("Return the inputs of a worker."),
        function("Return the rows; None if there are none."),
        function("Use the second one, if it is none of them."),
        function("Read one line, for example."),
        function("Keep the blocks, for a rank that has none."),
        'raise ValueError("its log says why")\n',
        "essay = 1\n",
    ],
)
def test_nothing_else_is_found(vocabulary, text):
    assert not list(vocabulary.style(text))


def test_every_checked_place_exists(vocabulary):
    for place in (*vocabulary.CHECKED, *vocabulary.CHECKED_STYLE):
        assert (ROOT / place).exists(), place


def test_lines_are_numbered_as_in_the_file(vocabulary):
    text = function("Read.", "", "Args:", "    names: of the route.")
    assert [line for line, _ in vocabulary.style("\n\n" + text)] == [7]


@pytest.fixture
def language(vocabulary):
    """The module of the figures."""
    return vocabulary.language


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A function that runs git in a repository with a branch main and a branch of work."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Test")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "test@example.com")
    limits = "[tool.hardpoint.language.commits]\n"
    (tmp_path / "pyproject.toml").write_text(limits)

    def git(*arguments):
        command = ["git", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "main")
    git("commit", "-q", "--allow-empty", "-m", "the subject of a commit in main is not checked")
    git("checkout", "-q", "-b", "work")
    git.root = tmp_path
    return git


@pytest.mark.parametrize(
    ("head", "percentage"),
    [
        ("What a worker needs.", 100),
        ("Blocks whose owner ended.", 100),
        ("Blocks of which most are free.", 100),
        ("Limits, those of the engine first.", 100),
        ("Return somewhat longer rows.", 0),
        ("", 0),
    ],
)
def test_relative_clauses_of_docstring_heads_are_counted(language, head, percentage):
    counts = language.Counts()
    counts.add_heads([head])
    assert counts.values()["relative-docstrings"] == percentage


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("def read(found, *, given=1, **kept): ...", 3),
        ("found = [one for one in rows]", 2),
        ("call(found=1)\nrow.own = found\nprint(what)", 0),
        ("with file as handed:\n    first, *asked = handed", 2),
        ("try: ...\nexcept OSError as what: ...", 1),
        ("match row:\n    case [one]: ...", 1),
        ("call(\n    lambda one: 1,\n)", 1),
    ],
)
def test_variables_and_parameters_with_unspecific_names_are_counted(language, code, number):
    assert language.unspecific_names(ast.parse(code), code) == number


@pytest.mark.parametrize(
    ("code", "percentage"),
    [
        ('raise ValueError("rows: expected those of the prompt")', 100),
        ('raise ValueError("rows: expected none, for the request has ended")', 100),
        ('raise ValueError("rows: expected 3, got 4")', 0),
        ('names = "those"  # those of the prompt alone', 0),
        ('"""Read those of the prompt."""', 0),
    ],
)
def test_messages_with_relative_clauses_are_counted(vocabulary, language, code, percentage):
    counts = language.Counts()
    counts.add_messages((text for _, text in vocabulary.literals(code)), vocabulary.ANY_STYLE)
    assert counts.values()["unclear-messages"] == percentage


def test_sentences_of_pages_are_counted_without_code_tables_and_headings(language):
    long = " ".join(["word"] * 31) + "."
    code = f"```\n{long}\n```"
    page = f"# {long}\n\n| {long} |\n\n{code}\n\nA short one. {long}\n\n- An item\n- {long}\n"
    counts = language.Counts()
    counts.add_page(page)
    assert (counts.sentences, counts.long_sentences) == (4, 2)


def test_sentences_of_generated_pages_are_not_counted(vocabulary, language):
    counts = language.Counts()
    vocabulary.count(ROOT / "docs" / "reference" / "types.md", "A sentence.", counts)
    vocabulary.count(ROOT / "docs" / "models.md", "A sentence.", counts)
    assert counts.sentences == 1


def test_code_spans_and_links_count_as_their_text(language):
    page = "Call `read(a, b)` of [the page](https://example.com/a b), then stop."
    assert [len(sentence.split()) for sentence in language.sentences(page)] == [7]


def test_a_figure_above_its_limit_is_a_problem(language, capsys):
    values = dict.fromkeys(language.FIGURES, 5.0)
    assert language.report(values, values) == []
    messages = language.report(values, {**values, "long-sentences": 4.9})
    assert messages == [
        "long-sentences: expected at most 4.9, got 5.0; reword your additions",
    ]
    assert "goal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("subject", "is_good"),
    [
        ("Fix the key of scaled adapters", True),
        ("Fixes the key of scaled adapters", False),
        ("The key of scaled adapters", False),
        ("Docs: fix the key", False),
        ("Fix " + "x" * 68, True),
        ("Fix " + "x" * 69, False),
    ],
)
def test_subjects_of_commits_since_main_are_checked(language, clone, subject, is_good):
    clone("commit", "-q", "--allow-empty", "-m", subject)
    problems = language.commit_problems(clone.root)
    assert bool(problems) != is_good
    assert all(subject in problem for problem in problems)


def test_subjects_of_merges_and_of_exempt_commits_are_not_checked(language, clone):
    clone("checkout", "-q", "-b", "other", "main")
    clone("commit", "-q", "--allow-empty", "-m", "a change")
    commit = clone("rev-parse", "HEAD")
    clone("checkout", "-q", "work")
    clone("commit", "-q", "--allow-empty", "-m", "Add a change")
    clone("merge", "-q", "-m", "the other change", "other")
    assert len(language.commit_problems(clone.root)) == 1
    with (clone.root / "pyproject.toml").open("a") as file:
        file.write(f'"{commit[:8]}" = "reason"\n')
    assert language.commit_problems(clone.root) == []


def test_a_folder_without_main_is_reported(language, tmp_path, capsys):
    assert language.commit_problems(tmp_path) == []
    assert "not checked" in capsys.readouterr().out

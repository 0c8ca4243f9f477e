"""The checks of scripts/vocabulary find what they are there for, and nothing else."""

import importlib

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

"""`hardpoint plugins new --from vllm`: ports of vLLM's logits processors."""

import ast
import sys

import pytest
from support.processes import run

from hardpoint.cli import main
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.loading import check_component
from hardpoint.plugins import Phase
from hardpoint.plugins.component import Source

V0_FUNCTION = """
import math

FORBIDDEN = 7


def no_sevens(output_ids, logits):
    '''Forbid a token.'''
    logits[FORBIDDEN] = -math.inf
    return logits
"""
V0_WITH_PROMPT = """
import math


class AcmeNoRepeat:
    def __call__(self, prompt_ids, output_ids, logits):
        for token in {*prompt_ids[-1:], *output_ids[-1:]}:
            logits[token] = logits[token] - 1
        return logits
"""
FACTORY = """
from vllm import SamplingParams


def make_boost(params: SamplingParams):
    \"\"\"Add a number to a token.\"\"\"
    token = params.extra_args["token"]

    def call(output_ids, logits):
        logits[token] += params.extra_args.get("by", 1.5)
        return logits

    return call
"""
V1 = """
import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

LIMIT = 3


class AcmeTarget(LogitsProcessor):
    \"\"\"Keeps one "token".\"\"\"

    @classmethod
    def validate_params(cls, params):
        if params.extra_args.get("target") is None:
            raise ValueError("target")

    def __init__(self, vllm_config: VllmConfig, device, is_pin_memory):
        self.targets = {}

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update: BatchUpdate | None):
        self.targets = {}

    @staticmethod
    def helper():
        return LIMIT

    def apply(self, logits):
        return logits
"""
V2 = """
import torch


class Favorite:
    def __init__(self, vllm_config, req_states):
        self.targets = torch.zeros(req_states.max_num_reqs)

    def add_request(self, req_idx, sampling_params):
        self.targets[req_idx] = sampling_params.extra_args["target_token"]
        return True

    def apply(self, logits, ctx):
        return logits
"""


@pytest.fixture
def port(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, *arguments, module):
        (tmp_path / "original.py").write_text(text, newline="")
        name = module.replace("_", "-")
        assert main(["plugins", "new", "--from", "vllm", "original.py", *arguments]) == 0
        return tmp_path / name

    return write


def loaded(folder, module):
    """Return the class of a port, checked as the loader checks it, and its source."""
    source = (folder / "src" / module / "__init__.py").read_text()
    names: dict = {"__name__": module}
    sys.modules[module] = type(sys)(module)
    try:
        exec(compile(source, module, "exec"), vars(sys.modules[module]))
        names = vars(sys.modules[module])
        cls = names["".join(part.capitalize() for part in module.split("_"))]
        check_component(cls, KINDS["logits_processors"], Source(module, module, "d", "1", "test"))
    finally:
        del sys.modules[module]
    ast.parse((folder / "tests" / f"test_{module}.py").read_text())
    return cls, source


@pytest.mark.parametrize(
    ("text", "module"), [(V0_FUNCTION, "no_sevens"), (V0_WITH_PROMPT, "acme_no_repeat")]
)
def test_ported_callable_keeps_the_rules_of_its_kind(port, text, module):
    folder = port(text, module=module)
    _, source = loaded(folder, module)
    assert "TODO: compute all rows at once" in source
    rules = "test_contract or test_effect or test_history or test_pure"
    command = [sys.executable, "-m", "pytest", "-q", "-k", rules, "-p", "no:cacheprovider"]
    printed = run(*command, "tests", path=folder / "src", cwd=folder, examples=0.05)
    assert "4 passed" in printed


def test_ported_factory_has_its_arguments_and_its_source(port):
    cls, source = loaded(port(FACTORY, module="make_boost"), "make_boost")
    assert cls.Arguments.__struct_fields__ == ("token", "by")
    assert cls.Arguments(token=1).by == 1.5
    assert "# TODO: from vllm import SamplingParams" in source
    assert '#             logits[token] += params.extra_args.get("by", 1.5)' in source
    assert 'NotImplementedError("TODO: port make_boost.apply")' in source


def test_ported_v1_class(port):
    cls, source = loaded(port(V1, module="acme_target"), "acme_target")
    assert (cls.phase, cls.argmax_invariant) == (Phase.TRUNCATE, True)
    assert cls.__doc__ == "Keeps one 'token'."
    assert cls.Arguments.__struct_fields__ == ("target",)
    assert "LIMIT = 3" in source
    for line in ('raise ValueError("target")', "def update_state", "return LIMIT"):
        (commented,) = [text for text in source.splitlines() if line in text]
        assert commented.lstrip().startswith("#")


def test_ported_class_has_arguments_read_through_a_variable(port):
    text = V1.replace(
        "        self.targets = {}\n",
        "        for index, params, *_ in batch_update.added:\n"
        "            args = params.extra_args or {}\n"
        "            self.targets[index] = args['token'], args.get('after', 3)\n",
    )
    assert text != V1
    source = (port(text, module="acme_target") / "src/acme_target/__init__.py").read_text()
    assert "        token: " in source
    assert "        after: int = 3" in source


@pytest.mark.parametrize("key", ["lambda", "class", "None", "top-k", "two\nlines", "", "float"])
def test_keys_that_cannot_be_fields_are_left_to_the_author(port, key):
    folder = port(FACTORY.replace('"by", 1.5', f"{key!r}, 0.5"), module="make_boost")
    cls, source = loaded(folder, "make_boost")
    assert cls.Arguments.__struct_fields__ == ("token",)
    assert f"        # TODO: a field with another name for the key {key!r}\n" in source
    assert "{ token = ... }" in (folder / "README.md").read_text()


def test_a_default_without_a_literal_is_left_to_the_author(port):
    cls, _ = loaded(port(FACTORY.replace("1.5", "1e999"), module="make_boost"), "make_boost")
    assert cls.Arguments(token=1).by is None


@pytest.mark.parametrize(
    ("line", "ported"),
    [
        ("def product(A, B, C):\n    return A@B@C", "return A@B@C"),
        ("def product(A, CLASS, C):\n    return A@CLASS@C", "return A@CLASS@C"),
        ("IDS = [\n    1,\n]; MORE = 2", "IDS = [\n    1,\n]\n\nMORE = 2\n"),
        ("IDS = 1; MORE = [\n]", "IDS = 1\n\nMORE = [\n]\n"),
        ("\f\nFEED = 'a\u2028b'  # a note\f", "FEED = 'a\u2028b'  # a note\f\n"),
        ("IDS = [\r\n    1,\r\n]\rMORE = 2", "IDS = [\n    1,\n]\n\nMORE = 2\n"),
        ("LONG = 'a'" + " + 'b'" * 600, " + 'b'\n"),
    ],
)
def test_the_rest_of_a_file_is_ported_as_it_is(port, line, ported):
    text = V0_FUNCTION.replace("FORBIDDEN = 7\n", f"FORBIDDEN = 7\n{line}\n")
    source = (port(text, module="no_sevens") / "src/no_sevens/__init__.py").read_text()
    assert ported in source
    assert "FORBIDDEN = 7" in source


def test_ported_v2_class(port):
    cls, _ = loaded(port(V2, "acme-mine", module="acme_mine"), "acme_mine")
    assert (cls.__name__, cls.phase) == ("AcmeMine", Phase.PENALTY)
    assert cls.Arguments.__struct_fields__ == ("target_token",)


def test_one_of_several_is_named(port, tmp_path, capsys):
    (tmp_path / "both.py").write_text(V1 + V2)
    assert main(["plugins", "new", "--from", "vllm", "both.py", "acme-mine"]) == 2
    assert "because the file has several: AcmeTarget, Favorite" in capsys.readouterr().err
    assert main(["plugins", "new", "--from", "vllm", "both.py:Favorite", "acme-mine"]) == 0
    assert (tmp_path / "acme-mine/src/acme_mine/__init__.py").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"def f(:\n", "line 1"),
        (b"\xff\xfe", "expected Python source in UTF-8"),
        (b"x = 1\0", "original.py"),
        (b"", "got none"),
        (b"class Other:\n    def run(self): ...\n", "got none"),
        (b"(" * 5000, "original.py"),
        (b"#" * (2 << 20), "expected at most 1048576 bytes"),
    ],
)
def test_files_without_a_processor_are_refused(tmp_path, monkeypatch, capsys, data, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "original.py").write_bytes(data)
    assert main(["plugins", "new", "--from", "vllm", "original.py"]) == 2
    error = capsys.readouterr().err
    assert "--from vllm: original.py" in error
    assert words in error
    assert [path.name for path in tmp_path.iterdir()] == ["original.py"]


def test_missing_file_and_missing_argument_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "--from", "vllm", "missing.py"]) == 2
    assert "missing.py: cannot be read: No such file" in capsys.readouterr().err
    assert main(["plugins", "new", "--from", "vllm"]) == 2
    assert "--from vllm: expected FILE, got none" in capsys.readouterr().err


def test_file_is_not_imported(port, tmp_path):
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\n{V2}"
    port(text, "acme-mine", module="acme_mine")
    assert not (tmp_path / "ran").exists()

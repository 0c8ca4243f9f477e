"""Which grammar backend validates an answer, and what its faults become."""

from __future__ import annotations

import pytest

from hardpoint.builtin_plugins.grammars.llguidance import LLGuidance
from hardpoint.core.config import config_from
from hardpoint.core.frontend.outputs.output_parsers import AnswerValidator
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.registry.plugin_set import resolve_plugins


class Silent(LLGuidance):
    """Validates nothing itself."""

    contract = 1

    @classmethod
    def validate(cls, structured, answer):
        raise NotImplementedError


class Strange(LLGuidance):
    """Finds fault with every answer."""

    contract = 1

    @classmethod
    def validate(cls, structured, answer):
        return f"{answer}: I do not like it"


class Failing(LLGuidance):
    contract = 1

    @classmethod
    def validate(cls, structured, answer):
        raise KeyError("schema")


class Wrong(LLGuidance):
    contract = 1

    @classmethod
    def validate(cls, structured, answer):
        return ["wrong"]


def validator(disabled=()):
    own = [f"{__name__}:{cls.__name__}" for cls in (Silent, Strange, Failing, Wrong)]
    use = "silent" if disabled else "llguidance"
    config, sources = config_from(
        {"plugins": {"enable": own, "disable": list(disabled)}, "grammar": {"use": use}}
    )
    return AnswerValidator(resolve_plugins(config, sources), config.grammar.use)


def lenient(backend=None):
    return StructuredOutputs(json={"type": "integer"}, lenient=True, backend=backend)


@pytest.mark.parametrize("backend", [None, "silent"])
def test_the_default_backend_validates_for_those_that_do_not(backend):
    check = validator()
    assert check.error(lenient(backend), "3") is None
    assert "is not of type 'integer'" in check.error(lenient(backend), '"3"')


def test_a_backend_may_validate_itself():
    assert validator().error(lenient("strange"), "3") == "3: I do not like it"


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("failing", "its validate failed: KeyError: 'schema'"),
        ("wrong", "its validate returned ['wrong'], expected text or None"),
    ],
)
def test_a_fault_of_the_backend_is_named_in_the_result(backend, reason):
    found = validator().error(lenient(backend), "3")
    assert found.startswith("the answer cannot be validated: ")
    assert backend in found
    assert found.endswith(reason)


def test_an_answer_that_nothing_validates_is_not_called_valid():
    found = validator(disabled=["llguidance"]).error(lenient(), "3")
    assert found == (
        "the answer cannot be validated: the grammar backend 'silent' has no `validate`"
    )

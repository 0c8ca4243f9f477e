"""Choice of the grammar backend that validates an answer, and its faults."""

from __future__ import annotations

import pytest
from support.samples import Sample

from hardpoint.builtin_plugins.grammars.llguidance import LLGuidance
from hardpoint.configuration.loading import config_from
from hardpoint.host.boundary.parts.frontend_parts import frontend_parts
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineCoreRequest, SamplingParams
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.structured import StructuredOutputs


class Silent(Sample, LLGuidance, contract=1):
    """Validates nothing itself."""

    @classmethod
    def validate(cls, structured, answer):
        raise NotImplementedError


class Strange(Sample, LLGuidance, contract=1):
    """Finds fault with every answer."""

    @classmethod
    def validate(cls, structured, answer):
        return f"{answer}: I do not like it"


class Failing(Sample, LLGuidance, contract=1):
    @classmethod
    def validate(cls, structured, answer):
        raise KeyError("schema")


class Wrong(Sample, LLGuidance, contract=1):
    @classmethod
    def validate(cls, structured, answer):
        return ["wrong"]


def validator(disabled=()):
    plugins = [f"{__name__}:{cls.__name__}" for cls in (Silent, Strange, Failing, Wrong)]
    use = "silent" if disabled else "llguidance"
    config, sources = config_from(
        {"plugins": {"enable": plugins, "disable": list(disabled)}, "grammar": {"use": use}}
    )
    vocabulary = Vocabulary(tokens=(b"1",), special=())
    parts = frontend_parts(
        resolve_plugins(config, sources), {"config": config}, lambda: vocabulary, 1, list
    )

    def flaw(answer, backend=None):
        structured = StructuredOutputs(json={"type": "integer"}, lenient=True, backend=backend)
        params = SamplingParams(structured=structured)
        request = EngineCoreRequest(request_id="r", prompt_token_ids=[0], params=params)
        assert parts.validator_of(request)
        return parts.validate(request, answer)

    return flaw


@pytest.mark.parametrize("backend", [None, "silent"])
def test_the_default_backend_validates_for_those_that_do_not(backend):
    check = validator()
    assert check("3", backend) is None
    assert "is not of type 'integer'" in check('"3"', backend)


def test_a_backend_may_validate_itself():
    assert validator()("3", "strange") == "3: I do not like it"


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("failing", "its validate failed: KeyError: 'schema'"),
        ("wrong", "its validate returned ['wrong'], expected text or None"),
    ],
)
def test_a_fault_of_the_backend_is_named_in_the_result(backend, reason):
    flaw = validator()("3", backend)
    assert flaw.startswith("the answer cannot be validated: ")
    assert backend in flaw
    assert flaw.endswith(reason)


def test_an_answer_that_nothing_validates_is_not_called_valid():
    flaw = validator(disabled=["llguidance"])("3")
    assert flaw == (
        "the answer cannot be validated: the grammar backend 'silent' has no `validate`"
    )

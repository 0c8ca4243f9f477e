"""Slips that Python lets pass: each is named in words when the plugins are resolved."""

from __future__ import annotations

import functools

import pytest
from support.plugins.fake import component, on

from hardpoint import plugins
from hardpoint.errors import PluginConflictError, PluginContractError
from hardpoint.plugins import (
    BatchLogitsProcessor,
    ConfigError,
    LogitsProcessor,
    SchedulingPolicy,
    StepPart,
)
from hardpoint.plugins.config import ConfigSources

WHO = "plugin 'dry' (acme-pack 2.0, acme_pack.logits_processors_dry:Thing)"


class CallableObject:
    def __call__(self, logits, rows):
        return logits


@pytest.fixture
def refusal(installed):
    """Enables a logits processor and returns the message with which it is refused."""

    def run(target, error=PluginContractError, enable="dry"):
        installed.offer("logits_processors/dry", target)
        with pytest.raises(error) as caught:
            installed.resolve(plugins={"enable": [enable]})
        return str(caught.value)

    return run


class TestClassMethods:
    @pytest.mark.parametrize("uses", [lambda self, params: True, True, property(lambda self: True)])
    def test_uses_must_be_one(self, refusal, uses):
        message = refusal(component(LogitsProcessor, uses=uses))
        assert message.startswith(WHO)
        assert "its uses is called on the class; write @classmethod above its def" in message

    def test_wraps_must_be_one(self, refusal):
        message = refusal(component(LogitsProcessor, wraps=lambda self, options: ()))
        assert "its wraps is called on the class; write @classmethod above its def" in message

    def test_a_static_method_is_called_on_the_class_too(self, installed):
        uses = staticmethod(lambda params: True)
        installed.offer("logits_processors/dry", component(LogitsProcessor, uses=uses))
        assert installed.resolve(plugins={"enable": ["dry"]})


class TestParameters:
    @pytest.mark.parametrize(
        ("given", "written"),
        [
            (lambda self: None, "(self)"),
            (lambda self, logits: None, "(self, logits)"),
            (lambda self, logits, rows, device: None, "(self, logits, rows, device)"),
            (lambda self, *, logits, rows: None, "(self, *, logits, rows)"),
        ],
    )
    def test_what_apply_cannot_be_called_with(self, refusal, given, written):
        message = refusal(component(LogitsProcessor, apply=given))
        assert f"its apply takes {written}, expected (self, logits, rows)" in message

    @pytest.mark.parametrize(
        "given",
        [
            lambda self, x, y: x,
            lambda self, *given: given[0],
            lambda self, logits, rows, more=None: logits,
            staticmethod(lambda logits, rows: logits),
            functools.partial(lambda logits, rows: logits),
            functools.partialmethod(lambda self, scale, logits, rows: logits, 2.0),
            functools.partialmethod(lambda self, logits, rows, *, scale: logits, scale=2.0),
            CallableObject(),
        ],
    )
    def test_what_it_can_be_called_with(self, installed, given):
        installed.offer("logits_processors/dry", component(LogitsProcessor, apply=given))
        assert installed.resolve(plugins={"enable": ["dry"]})

    def test_an_object_that_python_does_not_bind(self, refusal):
        message = refusal(component(LogitsProcessor, apply=functools.partial(lambda logits: 0)))
        assert "its apply takes (logits), expected (logits, rows)" in message

    def test_a_partial_method(self, refusal):
        apply = functools.partialmethod(lambda self, scale, logits: logits, 2.0)
        message = refusal(component(LogitsProcessor, apply=apply))
        assert "its apply takes (self, logits), expected (self, logits, rows)" in message

    def test_another_form_has_other_parameters(self, refusal):
        batch = component(BatchLogitsProcessor, phase=plugins.Phase.MASK, apply=lambda self: None)
        assert "its apply takes (self), expected (self, logits)" in refusal(batch)

    def test_a_static_method(self, refusal):
        message = refusal(component(LogitsProcessor, apply=staticmethod(lambda logits: logits)))
        assert "its apply takes (logits), expected (logits, rows)" in message

    def test_a_class_method(self, refusal):
        uses = classmethod(lambda cls: True)
        message = refusal(component(LogitsProcessor, uses=uses))
        assert "its uses takes (), expected (params)" in message

    def test_of_another_kind(self, installed):
        policy = component(SchedulingPolicy, key=lambda self: 0)
        value = installed.offer("scheduling_policies/acme", policy)
        with pytest.raises(PluginContractError, match=r"its key takes \(self\), expected"):
            installed.resolve(scheduler={"policy": value})


class TestParamsFields:
    def test_a_field_of_a_builtin(self, installed):
        fields = {"params_fields": ("min_p",)}
        installed.offer(
            "logits_processors/cut", component(LogitsProcessor, **fields), "hardpoint", "0.1.0"
        )
        value = installed.offer("logits_processors/dry", component(LogitsProcessor, **fields))
        with pytest.raises(PluginConflictError) as error:
            installed.resolve(plugins={"enable": ["dry"]})
        assert str(error.value) == (
            f"{WHO}, asked for by plugins.enable[0]: its params_fields name 'min_p', which "
            "'cut' applies, too; take its place, plugins.replace = { cut = "
            f'"{value}" }}, or switch it off, plugins.disable = ["cut"]'
        )
        resolved = installed.resolve(plugins={"replace": {"cut": value}})
        assert on(resolved)["logits_processors/cut"] == value
        assert installed.resolve(plugins={"disable": ["cut"], "enable": ["dry"]})


class TestOrder:
    @pytest.mark.parametrize("relation", ["before", "after"])
    def test_a_processor_that_names_itself(self, refusal, relation):
        message = refusal(
            component(LogitsProcessor, **{relation: ("top_k", "dry")}), PluginConflictError
        )
        assert message.startswith(WHO)
        assert message.endswith(f": its {relation} names 'dry', which is itself; remove the name")

    def test_the_replacement_of_what_it_names(self, installed):
        installed.offer("logits_processors/dry", component(LogitsProcessor, after=("min_p",)))
        assert installed.resolve(plugins={"replace": {"min_p": "dry"}})

    @pytest.mark.parametrize("relation", ["before", "after"])
    def test_a_processor_that_names_its_own_class(self, installed, relation):
        value = "acme_pack.logits_processors_dry:Thing"
        given = component(LogitsProcessor, **{relation: (value,)})
        assert installed.offer("logits_processors/dry", given) == value
        with pytest.raises(PluginConflictError) as error:
            installed.resolve(plugins={"enable": ["dry"]})
        assert str(error.value).endswith(
            f": its {relation} names {value!r}, which is itself; remove the name"
        )

    def test_a_step_part_that_names_itself(self, installed):
        installed.offer("step_parts/dry", component(StepPart, before=("dry",)))
        with pytest.raises(PluginConflictError, match="its before names 'dry', which is itself"):
            installed.resolve(plugins={"enable": ["step_parts/dry"]})


LONG = "x" * 10_000


class TestNames:
    @pytest.mark.parametrize(
        "name", ["two words", "tab\tbed", "", " ", "line\n", "a" * 101, "\x1b[31m", "a\u200bb"]
    )
    def test_of_an_entry_point(self, installed, name):
        value = installed.offer(
            f"logits_processors/{name}", component(LogitsProcessor), module="acme"
        )
        with pytest.raises(PluginContractError) as error:
            installed.resolve(plugins={"enable": [value]})
        message = str(error.value)
        assert f"{value}), asked for by " in message
        assert ": its name must be 1 to 100 printable characters without blanks; " in message
        assert message.endswith(f'; give it one: {{ use = "{value}", name = "..." }}')
        given = [{"use": value, "name": "dry"}]
        assert installed.resolve(plugins={"enable": given}).get("logits_processors", "dry")

    @pytest.mark.parametrize("name", ["two words", "tab\tbed", LONG, "\x1b[31m"])
    def test_that_the_configuration_gives(self, installed, name):
        value = installed.offer("logits_processors/dry", component(LogitsProcessor))
        config_sources = ConfigSources({"plugins.enable": "file x.toml"})
        with pytest.raises(ConfigError) as error:
            installed.resolve(config_sources, plugins={"enable": [{"use": value, "name": name}]})
        message = str(error.value)
        assert message.startswith(
            "plugins.enable[0].name: expected 1 to 100 printable characters without "
        )
        assert message.endswith(" (from file x.toml)")
        assert len(message) < 300

    def test_that_comes_from_a_class(self, installed):
        installed.module("loose", **{LONG: component(LogitsProcessor, LONG)})
        with pytest.raises(PluginContractError, match="its name must be 1 to 100 ") as error:
            installed.resolve(plugins={"enable": [f"loose:{LONG}"]})
        assert len(str(error.value)) < 1000

    def test_of_one_that_is_not_enabled(self, installed):
        installed.offer(f"logits_processors/{LONG}", component(LogitsProcessor))
        installed.offer("logits_processors/two words", component(LogitsProcessor))
        assert installed.resolve()

"""Component adapters are selected like other plugins, and adapt foreign objects in each process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from support.broken import component_adapters as samples
from support.plugins import transformers_processors as foreign

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.component_adapters import Transformers
from hardpoint.errors import (
    ConfigError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
)
from hardpoint.host.registry.adapt import adapter_of
from hardpoint.host.registry.discovery import discover
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import LogitsContext, LogitsProcessor, LogitsRequest, Phase, hookimpl
from hardpoint.testing import scripted_config

THING = {"use": "elsewhere:Thing", "name": "thing"}
ADAPTER = "support.broken.component_adapters:Right"


@pytest.fixture
def loaded(installed):
    """Enables a target by FQCN as `thing`; returns the set of plugins and the class."""
    installed.offer("component_adapters/transformers", Transformers, "hardpoint", "0.1.0")

    def run(target, options=None, enable=()):
        installed.module("elsewhere", Thing=target)
        options = {"thing": options} if options else {}
        plugins = installed.resolve(plugins={"enable": [*enable, THING]}, plugin=options)
        return plugins, plugins.target(plugins.get("logits_processors", "thing"))

    return run


@pytest.fixture
def refused(loaded):
    """Returns the message with which a target is refused."""

    def run(target, options=None, error=PluginContractError, **more):
        with pytest.raises(error) as caught:
            loaded(target, options, **more)
        return str(caught.value)

    return run


def form(plugins, name):
    """Return the external form of a logits processor."""
    return adapter_of(plugins.target(plugins.get("logits_processors", name)))


def built(plugins, **fields):
    entry = plugins.get("logits_processors", "thing")
    sizes = {"device": torch.device("cpu"), "vocab_size": 80, "max_num_seqs": 4, "ops": None}
    return plugins.create(entry, LogitsContext, **{**sizes, **fields})


@pytest.mark.parametrize(
    "target", [foreign.Counting, foreign.counting, foreign.repetition, foreign.both]
)
def test_transformers_forms_are_adapted_by_the_built_in(loaded, target):
    _, cls = loaded(target)
    assert issubclass(cls, LogitsProcessor)
    assert adapter_of(cls) == "transformers LogitsProcessor"
    assert (cls.phase, cls.argmax_invariant) == (Phase.PENALTY, False)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("by", ["name", "FQCN", "unknown FQCN"])
def test_an_adapter_is_enabled_by_name_or_fqcn_in_any_order(installed, by, is_first):
    installed.module("elsewhere", Thing=samples.Bias)
    fqcn = (
        ADAPTER
        if by == "unknown FQCN"
        else installed.offer("component_adapters/acme", samples.Right)
    )
    use = "acme" if by == "name" else fqcn
    enable = [use, THING] if is_first else [THING, use]
    plugins = installed.resolve(plugins={"enable": enable})
    assert (
        adapter_of(plugins.target(plugins.get("logits_processors", "thing"))) == "class with bias"
    )


def test_an_installed_adapter_is_not_enabled(installed):
    installed.module("elsewhere", Thing=samples.Bias)
    installed.offer("component_adapters/acme", samples.Right)
    with pytest.raises(PluginContractError, match="it is no plugin"):
        installed.resolve(plugins={"enable": [THING]})


def test_the_built_in_can_be_disabled_and_replaced(installed):
    installed.offer("component_adapters/transformers", Transformers, "hardpoint", "0.1.0")
    installed.module("elsewhere", Thing=foreign.Repetition)
    with pytest.raises(PluginContractError, match="it is no plugin"):
        installed.resolve(plugins={"enable": [THING], "disable": ["transformers"]})
    value = installed.offer("component_adapters/acme", samples.MatchesAll)
    installed.module("elsewhere", Thing=samples.Bias)
    plugins = installed.resolve(plugins={"enable": [THING], "replace": {"transformers": value}})
    assert (
        adapter_of(plugins.target(plugins.get("logits_processors", "thing"))) == "class with bias"
    )


def test_a_manifest_alone_gives_the_same_component(loaded):
    """As another process loads it."""
    options = {"phase": "mask", "every_request": True}
    here, _ = loaded(foreign.Counting, options)
    there = PluginSet(here.manifest, (), {})
    cls = there.target(there.get("logits_processors", "thing"))
    assert (cls.phase, cls.every_request) == (Phase.MASK, True)
    assert adapter_of(cls) == "transformers LogitsProcessor"


def test_constructor_arguments_come_from_the_options(loaded, refused):
    loaded(foreign.Repetition, {"args": {"penalty": 1.2}})
    message = refused(foreign.Repetition, {"args": {"factor": 2}}, ConfigError)
    assert message.startswith("plugin.thing.args: they do not fit Repetition(penalty): ")
    assert "'penalty'" in refused(foreign.Repetition, None, ConfigError)
    message = refused(foreign.repetition, {"args": {"penalty": 2}}, ConfigError)
    assert message.startswith("plugin.thing.args: elsewhere:Thing is built already")


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (samples.Truthy, "its matches returned 'bias', expected True or False"),
        (samples.Unmarked, "expected a class derived from hardpoint.plugins.AdaptedComponent"),
        (samples.Abstract, "it lacks apply"),
        (samples.WithOptions, "it has Options, but a component adapter has none"),
        (samples.NoContract, "it states no contract version"),
    ],
)
def test_a_broken_adapter_is_refused_by_name(installed, refused, adapter, message):
    installed.offer("component_adapters/acme", adapter)
    assert message in refused(samples.Bias, enable=["acme"])


def test_a_near_miss_is_refused_by_its_name(installed, refused):
    installed.offer("component_adapters/acme", samples.Right)
    message = refused(samples.NearMiss, enable=["acme"])
    assert message.startswith("plugin 'Thing'") or message.startswith("plugin 'thing'")
    assert message.endswith("its bias must be a method")


class Raising(type):
    def __getattr__(cls, name):
        raise LookupError(name)


class Unreadable(foreign.Counting, metaclass=Raising):
    """A metaclass of its own fails."""


def test_a_class_that_cannot_be_looked_at_is_named(refused):
    assert "looking at it failed: LookupError: " in refused(Unreadable)


@pytest.mark.parametrize("target", [type("Plain", (), {}), 3])
def test_other_objects_are_no_plugins(refused, target):
    message = refused(target)
    assert "it is no plugin: it derives from no interface" in message
    assert "pip install" not in message


def test_an_object_of_another_kind_is_not_adapted(installed):
    installed.offer("component_adapters/acme", samples.Right)
    value = installed.offer("models/Foreign", samples.Bias)
    with pytest.raises(PluginContractError, match="models must be classes derived from"):
        installed.resolve(plugins={"enable": ["acme"], "replace": {"LlamaForCausalLM": value}})


def test_code_that_lacks_a_module_is_imported_with_stand_ins(installed, tmp_path, monkeypatch):
    source = f"import {samples.MODULE}\nfrom support.broken.component_adapters import Bias\n"
    (tmp_path / "needs_a_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    enable = [ADAPTER, {"use": "needs_a_module:Bias", "name": "thing"}]
    plugins = installed.resolve(plugins={"enable": enable})
    assert plugins.target(plugins.get("logits_processors", "thing")).target is samples.Bias
    assert samples.MODULE not in sys.modules
    del sys.modules["needs_a_module"]
    with pytest.raises(PluginLoadError, match=f"No module named '{samples.MODULE}'"):
        installed.resolve(plugins={"enable": enable[1:]})


def test_an_object_that_needs_a_module_is_imported_with_stand_ins(installed, tmp_path, monkeypatch):
    source = (
        f"try:\n    import {samples.MODULE}\nexcept ImportError:\n    pass\n"
        "else:\n    from support.broken.component_adapters import Bias\n"
    )
    (tmp_path / "may_need_a_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    enable = [ADAPTER, {"use": "may_need_a_module:Bias", "name": "thing"}]
    plugins = installed.resolve(plugins={"enable": enable})
    assert plugins.target(plugins.get("logits_processors", "thing")).target is samples.Bias
    assert samples.MODULE not in sys.modules
    del sys.modules["may_need_a_module"]
    for refused_enable in (enable[1:], [ADAPTER, "may_need_a_module:Other"]):
        with pytest.raises(PluginNotFoundError, match="'may_need_a_module' has no"):
            installed.resolve(plugins={"enable": refused_enable})


class Greeter:
    """Hooks, which happen to be callable."""

    contract = 1

    @hookimpl
    def engine_closing(self):
        """Do nothing."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor):
        return None


class Provider:
    """Hooks that provide a foreign class."""

    contract = 1

    @staticmethod
    @hookimpl
    def hardpoint_components():
        return {"boosted": samples.Bias}


def test_hooks_and_modules_are_left_alone(installed, refused):
    assert "it is no plugin" in refused(ModuleType("empty"))
    installed.module("greeting", Greeter=Greeter)
    plugins = installed.resolve(plugins={"enable": ["greeting:Greeter"]})
    assert plugins.target(plugins.one("hooks")) is Greeter


def test_hooks_may_provide_a_foreign_class(installed):
    installed.module("providing", Provider=Provider)
    enable = ["providing:Provider", "boosted", ADAPTER]
    plugins = installed.resolve(plugins={"enable": enable})
    assert (
        adapter_of(plugins.target(plugins.get("logits_processors", "boosted"))) == "class with bias"
    )


def test_a_program_hands_over_an_adapter_and_what_it_adapts(scripted):
    params = SamplingParams(max_tokens=2, plugin_args={"bias": {}}, ignore_eos=True)
    config = scripted_config(scripted)
    with LLM(config=config, plugins=[samples.Right, samples.Bias]) as llm:
        assert len(llm.generate("x", params)[0].outputs[0].token_ids) == 2
    with pytest.raises(PluginContractError, match="it is no plugin"):
        LLM(config=config, plugins=[samples.Bias])


def foreign_point(monkeypatch, value):
    """Offer `tokens` under vLLM's group, instead of what is installed."""

    class Point:
        group, name = "vllm.logits_processors", "tokens"

        class dist:  # noqa: N801
            name, version = "acme-vllm", "3.0"

    Point.value = value
    monkeypatch.setattr("importlib_metadata.entry_points", lambda: [Point])


def test_foreign_groups_are_looked_into_when_configured(installed, monkeypatch):
    target = "support.broken.component_adapters:Bias"
    foreign_point(monkeypatch, target)
    assert discover() == []
    (found,) = discover(["vllm.logits_processors"])
    assert found.label == f"logits_processors/tokens (acme-vllm 3.0, {target})"
    installed.found.append(found)
    plugins = installed.resolve()
    assert found in plugins.not_enabled()
    plugins = installed.resolve(plugins={"enable": [ADAPTER, "tokens"]})
    entry = plugins.get("logits_processors", "tokens")
    assert adapter_of(plugins.target(entry)) == "class with bias"


def test_the_loader_imports_no_torch():
    script = (
        "import sys, hardpoint.plugins, hardpoint.host.registry.adapt;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


class Uncopied:
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor):
        return scores

    def __deepcopy__(self, memo):
        return None


UNCOPIED = Uncopied()


def test_an_object_that_cannot_be_copied_is_not_left_out(loaded):
    plugins, _ = loaded(UNCOPIED)
    request = LogitsRequest("r", [1], [], SamplingParams(), [])
    with pytest.raises(
        TypeError, match="its __deepcopy__ returned a NoneType, expected a processor"
    ):
        built(plugins).start(request)


@dataclass
class OneRow:
    """The rows of a step with one request."""

    request: LogitsRequest
    state: Any
    version: int = 0

    @property
    def requests(self):
        return [self.request]

    def states(self):
        return [self.state]


def test_an_object_is_called_once_per_position(loaded):
    plugins, _ = loaded(foreign.Counting)
    processor = built(plugins, vocab_size=80)
    request = LogitsRequest("r", [1, 2], [], SamplingParams(), [])
    state = processor.start(request)

    def chosen(row):
        return processor.apply(row.clone(), OneRow(request, state)).argmax().item()

    first, second = torch.rand(1, 80), torch.rand(1, 80)
    assert [chosen(first), chosen(first)] == [65, 65]
    assert state.call.calls == 1
    request.output_token_ids.append(65)
    assert [chosen(second), chosen(second)] == [66, 66]
    assert state.call.calls == 2
    assert chosen(first) == 67  # other logits are another question


def test_an_object_is_called_as_without_drafts(loaded):
    plugins, _ = loaded(foreign.Counting)
    processor = built(plugins, vocab_size=80)
    request = LogitsRequest("r", [1, 2], [], SamplingParams(), [])
    state = processor.start(request)

    def chosen(*drafts):
        view = request
        if drafts:
            view = replace(request, output_token_ids=[*request.output_token_ids, *drafts])
            view = replace(view, draft_of=request)
        return processor.apply(torch.rand(1, 80), OneRow(view, processor.fork(state))).argmax()

    assert [chosen(), chosen(9), chosen(9, 8), chosen(7)] == [65, 66, 67, 66]
    assert state.call.calls == 1
    request.output_token_ids.extend([9, 5])  # one draft is kept, and a token in place of the next
    assert [chosen(), chosen(6)] == [67, 68]
    request.output_token_ids.append(4)
    assert chosen() == 68

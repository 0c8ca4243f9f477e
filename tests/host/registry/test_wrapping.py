"""A component wraps another one of its kind: by composition, with all checks, in every process."""

from __future__ import annotations

import json
import re

import pytest
from support.driving import FINAL, run, varied_jobs
from support.fault_cases import run_all
from support.plugins import wrapping
from support.plugins.fake import component
from support.process.harness import open_engine

from hardpoint import SamplingParams
from hardpoint.cli import main
from hardpoint.errors import (
    EngineFaultError,
    PluginConflictError,
    PluginContractError,
    PluginError,
    PluginFaultError,
    PluginLoadError,
    PluginNotFoundError,
)
from hardpoint.plugins import (
    Arguments,
    AttentionBackend,
    Executor,
    ExecutorContext,
    GrammarBackend,
    KVConnector,
    LogitsProcessor,
    Model,
    Options,
    Sampler,
    SchedulingPolicy,
    Wrapper,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.testing import SchedulingPolicySuite, scripted_engine

HERE = wrapping.__name__
JOBS = varied_jobs(20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, **FINAL)
BY_KIND = {
    "scheduler": "LoggedScheduler",
    "executor": "LoggedExecutor",
    "tokenizer": "LoggedTokenizer",
    "sampler": "LoggedSampler",
}


def logging_to(path, **tables):
    """Return the configuration in which each kind is wrapped and logs to a file."""
    names = ("scheduler", "executor", "tokenizer", "sampler")
    config = {kind: {"use": f"{HERE}:{name}"} for kind, name in BY_KIND.items()}
    config["plugin"] = {f"logged_{name}": {"log": str(path)} for name in names}
    return config | tables


@pytest.fixture(scope="module")
def plain(scripted):
    engine = scripted_engine(scripted)
    yield run(engine, JOBS, per_step=3)
    engine.close()


@pytest.mark.parametrize("open_it", [scripted_engine, open_engine])
def test_each_does_what_the_built_in_does_and_logs_it(scripted, tmp_path, plain, open_it):
    engine = open_it(scripted, logging_to(tmp_path / "log"))
    assert run(engine, JOBS, per_step=3) == plain
    engine.add_request("say", "say abc", GREEDY)
    assert run_all(engine, [])["say"].outputs[0].text == " ab"
    engine.close()
    lines = (tmp_path / "log").read_text().splitlines()
    kinds = {line.split(" ")[0] for line in lines}
    assert kinds == {"schedule", "execute", "encode", "sample", "close"}
    assert "encode say abc" in lines
    assert lines.count("close scheduler") == 1


def test_a_chain_by_fqcn_with_the_options_of_each(scripted, tmp_path, plain):
    config = {"executor": {"use": f"{HERE}:Chained"}}
    config["plugin"] = {"logged_executor": {"log": str(tmp_path / "log")}}
    engine = scripted_engine(scripted, config)
    assert run(engine, JOBS, per_step=3) == plain
    engine.close()
    assert (tmp_path / "log").read_text().startswith("execute 1\n")


def test_two_components_without_the_mixin(scripted, tmp_path, plain):
    config = {"sampler": {"use": f"{HERE}:ByHand"}}
    config["plugin"] = {"logged_sampler": {"log": str(tmp_path / "log")}}
    engine = scripted_engine(scripted, config)
    assert run(engine, JOBS, per_step=3) == plain
    engine.close()
    assert (tmp_path / "log").read_text().startswith("sample [")


class TestFaults:
    """The wrapped component whose method failed is named, not the one around it."""

    def test_that_end_the_engine(self, scripted, tmp_path):
        config = logging_to(tmp_path / "log")
        config["plugin"]["logged_sampler"]["wraps"] = f"{HERE}:FailingSampler"
        engine = scripted_engine(scripted, config)
        with pytest.raises(EngineFaultError) as error:
            run_all(engine, [("r", [1], GREEDY)])
        assert str(error.value).startswith(
            f"plugin 'failing_sampler' ({HERE}:FailingSampler), asked for by "
            f"plugin 'logged_sampler'"
        )
        assert str(error.value).endswith("KeyError: 'no race'")

    def test_that_end_a_call(self, open_engine, tmp_path):
        config = logging_to(tmp_path / "log")
        config["plugin"]["logged_tokenizer"]["wraps"] = f"{HERE}:FailingTokenizer"
        engine = open_engine(config)
        with pytest.raises(PluginFaultError) as error:
            engine.add_request("r", "fail", GREEDY)
        assert str(error.value).startswith("plugin 'failing_tokenizer'")
        assert str(error.value).endswith(": its encode failed: KeyError: 'no such text'")

    def test_that_are_counted(self, open_engine):
        config = {"scheduler": {"policy": f"{HERE}:WrappedPolicy"}}
        engine = open_engine(config)
        run_all(engine, [("r", [1], GREEDY)])
        message = engine.health().fallbacks["wrapped_policy"].message
        assert message.startswith(f"plugin 'failing_policy' ({HERE}:FailingPolicy)")
        assert message.endswith(
            ": scheduled() failed, called by 'wrapped_policy': KeyError: 'no books'"
        )

    def test_of_a_constructor_close_what_was_built(self, scripted):
        wrapping.ClosedExecutor.closed = 0
        with pytest.raises(PluginLoadError, match="'unbuilt'.*its constructor failed: KeyError"):
            scripted_engine(scripted, {"executor": {"use": f"{HERE}:Unbuilt"}})
        assert wrapping.ClosedExecutor.closed == 1

    def test_of_the_loader_name_both(self, scripted):
        with pytest.raises(PluginContractError) as error:
            scripted_engine(scripted, {"sampler": {"use": f"{HERE}:Undeclared"}})
        assert "'undeclared'" in str(error.value)
        expected = "it builds 'other', which its wraps() does not return: 'default'"
        assert str(error.value).endswith(expected)


def wrapper(interface, wraps, **options):
    """Return a class that wraps another component and keeps all of it."""
    fields = {"__annotations__": {"wraps": str}, "wraps": wraps, **options}
    declared = type("Declared", (Wrapper.Options,), fields)
    bases = (Wrapper[interface], interface)
    return type("Fake", bases, {"contract": 1, "Options": declared})


class TestAtStart:
    def test_a_cycle(self, installed):
        installed.offer("executors/one", wrapper(Executor, "two"))
        installed.offer("executors/two", wrapper(Executor, "one"))
        with pytest.raises(PluginConflictError) as error:
            installed.resolve(executor={"use": "one"})
        assert str(error.value).startswith("plugin 'two' (acme-pack 2.0, ")
        assert str(error.value).endswith(
            "it wraps 'one', which is already around it: one wraps two wraps one; "
            "let plugin.two.wraps name another one (from default)"
        )

    def test_one_that_wraps_itself(self, installed):
        installed.offer("executors/one", wrapper(Executor, "uniproc"))
        sources = ConfigSources({"plugin.one.wraps": "file x.toml"})
        config = {"executor": {"use": "one"}, "plugin": {"one": {"wraps": "one"}}}
        with pytest.raises(PluginConflictError, match=r"one wraps one; .*\(from file x.toml\)"):
            installed.resolve(sources, **config)

    def test_a_name_that_nothing_has(self, installed):
        installed.offer("executors/one", wrapper(Executor, "uniprok"))
        with pytest.raises(PluginNotFoundError) as error:
            installed.resolve(executor={"use": "one"})
        assert str(error.value).startswith(
            "plugin.one.wraps: no executors component is called 'uniprok' (did you mean 'uniproc'?)"
        )

    def test_the_option_that_names_it_is_reported(self, installed):
        """It has the name that the class gave it, and may be a list; without one, the table."""

        class Several(component(Executor)):
            contract = 1

            class Options(Options):
                links: list[str]

            @classmethod
            def wraps(cls, options):
                return options.links

        class Fixed(component(Executor)):
            contract = 1

            @classmethod
            def wraps(cls, options):
                return ["uniprok"]

        installed.offer("executors/several", Several)
        installed.offer("executors/fixed", Fixed)
        sources = ConfigSources({"plugin.several.links": "file x.toml"})
        for links, expected in (
            (["uniproc", "uniprok"], r"^plugin\.several\.links: no executors .*from file x.toml"),
            (["several"], r"several wraps several; let plugin\.several\.links .*from file x.toml"),
        ):
            config = {"executor": {"use": "several"}, "plugin": {"several": {"links": links}}}
            with pytest.raises(PluginError, match=expected):
                installed.resolve(sources, **config)
        with pytest.raises(PluginNotFoundError, match=r"^plugin\.fixed: no executors component"):
            installed.resolve(executor={"use": "fixed"})

    def test_one_of_another_kind_or_against_the_contract(self, installed):
        value = installed.offer("samplers/race", component(Sampler, contract=None))
        installed.offer("executors/one", wrapper(Executor, value))
        installed.offer("samplers/two", wrapper(Sampler, "race"))
        with pytest.raises(PluginContractError, match="'race'.*asked for by plugin 'one'"):
            installed.resolve(executor={"use": "one"})
        with pytest.raises(PluginContractError, match="'race'.*'two'.*states no contract version"):
            installed.resolve(sampler={"use": "two"})

    def test_its_options_have_their_own_table(self, installed):
        class Given(Options):
            size: int

        installed.offer("executors/far", component(Executor, Options=Given))
        installed.offer("executors/one", wrapper(Executor, "far"))
        with pytest.raises(ValueError, match="plugin.far.size: missing, and it has no default"):
            installed.resolve(executor={"use": "one"})
        with pytest.raises(ValueError, match=r"plugin.far.size: expected .*got 'x'"):
            installed.resolve(executor={"use": "one"}, plugin={"far": {"size": "x"}})
        set_ = installed.resolve(executor={"use": "one"}, plugin={"far": {"size": 3}})
        (entry,) = set_.one("executors").wraps.values()
        assert entry.options == {"size": 3}
        other = installed.resolve(executor={"use": "one"}, plugin={"far": {"size": 4}})
        assert set_.manifest.hash != other.manifest.hash
        assert all(found.name != "far" for found in set_.not_enabled())

    def test_the_place_of_the_wrapped_one(self, installed):
        """A wrapper under the name of what it wraps has the table of that name."""
        value = installed.offer("models/other", wrapper(Model, "LlamaForCausalLM"))
        set_ = installed.resolve(
            plugins={"replace": {"LlamaForCausalLM": value}},
            plugin={"LlamaForCausalLM": {"wraps": "LlamaForCausalLM"}},
        )
        entry = set_.get("models", "LlamaForCausalLM")
        (inner,) = entry.wraps.values()
        assert (entry.name, entry.distribution) == ("LlamaForCausalLM", "acme-pack")
        assert (inner.name, inner.distribution) == ("LlamaForCausalLM", "hardpoint")
        assert set_.target(inner) is not set_.target(entry)

    def test_arguments_are_the_wrappers(self, installed):
        class Given(Arguments):
            top: int = 1

        installed.offer("samplers/race", component(Sampler, Arguments=Given))
        installed.offer("samplers/one", wrapper(Sampler, "race"))
        outer = wrapper(Sampler, "race")
        outer.Arguments = Given
        installed.offer("samplers/two", outer)
        with pytest.raises(PluginContractError, match="wraps 'race', which takes arguments of req"):
            installed.resolve(sampler={"use": "one"})
        assert installed.resolve(sampler={"use": "two"}).one("samplers").wraps

    def test_what_is_wrapped_is_a_list_of_names(self, installed):
        none = component(Sampler, wraps=classmethod(lambda _cls, _options: None))
        installed.offer("samplers/none", none)
        expected = r"its wraps\(\) returned None, expected a list of names"
        with pytest.raises(PluginContractError, match=expected):
            installed.resolve(sampler={"use": "none"})
        own = {"contract": 1, "Options": type("Own", (Options,), {})}
        installed.offer("samplers/own", type("Fake", (Wrapper[Sampler], Sampler), own))
        expected = "its Options must derive from hardpoint.plugins.Wrapper.Options"
        with pytest.raises(PluginContractError, match=expected):
            installed.resolve(sampler={"use": "own"})

    def test_logits_processors_are_ordered_instead(self, installed):
        outer = component(LogitsProcessor, wraps=classmethod(lambda _cls, _options: ("min_p",)))
        installed.offer("logits_processors/outer", outer)
        with pytest.raises(PluginContractError, match="wraps no other one; enable both, and order"):
            installed.resolve(plugins={"enable": ["outer"]})


class TestTheMixin:
    def test_forwards_all_but_what_is_overridden(self):
        class Inner(SchedulingPolicy):
            contract = 1
            state_format = "books"

            def key(self, request):
                return request

            def admit(self, request, load):
                return "later"

        class Outer(Wrapper[SchedulingPolicy], SchedulingPolicy):
            contract = 1

            def victim(self, running, load):
                return super().victim(running, load)

        outer = Outer.__new__(Outer)
        outer.wrapped = Inner.__new__(Inner)
        assert outer.key(3) == 3
        assert outer.admit(1, None) == "later"
        assert outer.victim([1, 2], None) == 2
        assert outer.state_format == "books"
        assert outer.overridden == {"admit", "victim"}
        assert Outer.state_format == ""
        assert not Outer.__abstractmethods__

    def test_the_order_of_the_bases(self):
        with pytest.raises(TypeError, match=r"expected the base Wrapper\[Executor\] before Exec"):
            type("Wrong", (Executor, Wrapper[Executor]), {})

    def test_a_context_made_by_hand(self):
        context = ExecutorContext(
            name="mine", options=None, parallel=None, launch=None, start_process=None, progress=None
        )
        with pytest.raises(NotImplementedError, match="'mine' was made by hand .* pass creator"):
            context.create("uniproc")


@pytest.mark.usefixtures("folder")
def test_the_command_shows_what_is_wrapped(capsys, tmp_path):
    settings = ["--set", f"sampler.use={HERE}:LoggedSampler"]
    settings += ["--set", f"plugin.logged_sampler.log={tmp_path / 'log'}"]
    assert main(["plugins", "list", "--json", *settings]) == 0
    listed = {
        (each["kind"], each["name"]): (each["on"], each["why"])
        for each in json.loads(capsys.readouterr().out)
    }
    assert listed["samplers", "logged_sampler"][0]
    assert listed["samplers", "default"] == (True, "wrapped by logged_sampler")
    assert main(["plugins", "show", "samplers/default", *settings]) == 0
    assert "on: wrapped by logged_sampler" in capsys.readouterr().out
    assert main(["plugins", "show", "logged_sampler", *settings]) == 0
    assert re.search('wraps +a string; default "default"', capsys.readouterr().out)


class TestWrappedPolicy(SchedulingPolicySuite):
    """The suites build what a class wraps."""

    policy = wrapping.KeptPolicy
    examples = 0.05
    budget_us_per_request = None


def test_a_generic_interface_is_wrapped_with_its_parameters():
    class Backend(Wrapper[AttentionBackend[int, str]], AttentionBackend[int, str]):
        contract = 1

    assert Backend.__mro__[1].__name__ == "Wrapper[AttentionBackend]"
    assert not Backend.__abstractmethods__


def test_of_a_class_its_class_methods_and_types_are_those_of_the_interface():
    class Backend(Wrapper[GrammarBackend], GrammarBackend):
        contract = 1

    class Connector(Wrapper[KVConnector], KVConnector):
        contract = 1

    assert Backend.validate.__func__ is GrammarBackend.validate.__func__
    assert Connector.Metadata is KVConnector.Metadata

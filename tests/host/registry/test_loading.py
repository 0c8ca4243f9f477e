"""Loading one component: every fault is reported with its component and what to write."""

from __future__ import annotations

import sys

import pytest
from support.plugins.fake import component

from hardpoint.errors import (
    EngineClosedError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
)
from hardpoint.host.registry.loading import snake_case
from hardpoint.plugins import Arguments as PluginArguments
from hardpoint.plugins import (
    AttentionBackend,
    BatchLogitsProcessor,
    EvictionPolicy,
    Executor,
    LogitsProcessor,
    Model,
    OutputParser,
    Phase,
    Sampler,
    SamplerContext,
    SchedulingPolicy,
    SparseLogitsProcessor,
    StepPart,
    Tokenizer,
    hookimpl,
)
from hardpoint.plugins import Options as PluginOptions
from hardpoint.plugins.component import Context
from hardpoint.plugins.config_tables import SamplerConfig, SchedulerConfig
from hardpoint.plugins.sampling.logits import LogitsPlugin

WHO = "plugin 'dry' (acme-pack 2.0, "


@pytest.fixture
def refusal(installed):
    """Enables a target of a kind and returns the message with which it is refused."""

    def run(target, kind="logits_processors", error=PluginContractError):
        installed.offer(f"{kind}/dry", target)
        with pytest.raises(error) as caught:
            installed.resolve(plugins={"enable": ["dry"]})
        message = str(caught.value)
        assert message.startswith(WHO)
        assert "asked for by plugins.enable[0]" in message.split(": ")[0]
        return message

    return run


class TestImport:
    @pytest.fixture
    def written(self, tmp_path, monkeypatch):
        """Writes a module that can be imported until the test ends."""
        monkeypatch.syspath_prepend(str(tmp_path))

        def write(name, text):
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)

        return write

    def test_an_error_while_importing_is_the_plugins(self, installed, written):
        written("broken_pack", "raise RuntimeError('no licence')")
        with pytest.raises(PluginLoadError) as error:
            installed.resolve(plugins={"enable": ["broken_pack:Thing"]})
        assert "broken_pack:Thing), asked for by plugins.enable[0]" in str(error.value)
        assert str(error.value).endswith("its import failed: RuntimeError: no licence")
        assert isinstance(error.value.__cause__, RuntimeError)

    def test_a_dependency_that_is_missing_is_not_the_plugin_missing(self, installed, written):
        written("needy_pack", "import not_there_at_all")
        with pytest.raises(
            PluginLoadError, match=r"its import failed: ModuleNotFoundError.*not_th"
        ):
            installed.resolve(plugins={"enable": ["needy_pack:Thing"]})

    def test_a_syntax_error_is_the_plugins(self, installed, written):
        written("untidy_pack", "def:")
        with pytest.raises(PluginLoadError, match="its import failed: SyntaxError"):
            installed.resolve(plugins={"enable": ["untidy_pack:Thing"]})

    @pytest.mark.parametrize(
        ("reference", "missing"),
        [("no_pack:Thing", "no_pack"), ("no_pack.deep:Thing", "no_pack"), ("json.no:T", "json.no")],
    )
    def test_a_module_that_does_not_exist(self, installed, reference, missing):
        with pytest.raises(PluginNotFoundError, match=f"there is no module '{missing}'$"):
            installed.resolve(plugins={"enable": [reference]})

    @pytest.mark.parametrize("name", ["Missing", "Outer.Missing"])
    def test_an_attribute_that_does_not_exist(self, installed, name):
        installed.module("half_pack", Outer=object)
        with pytest.raises(PluginNotFoundError, match=f"'half_pack' has no '{name}'$"):
            installed.resolve(plugins={"enable": [f"half_pack:{name}"]})


class TestInterface:
    def test_not_a_class(self, refusal):
        message = refusal(lambda logits: logits, kind="models")
        assert "models must be classes derived from hardpoint.plugins Model" in message
        assert message.endswith("this is a function")

    def test_an_instance(self, refusal):
        assert "this is a int" in refusal(3)

    def test_a_class_of_another_kind(self, refusal):
        message = refusal(component(SchedulingPolicy), kind="models")
        assert message.endswith(
            "models must be classes derived from hardpoint.plugins Model, "
            "this is a class derived from SchedulingPolicy"
        )

    def test_an_fqcn_that_is_no_plugin_at_all(self, installed):
        installed.module("plain", Thing=type("Thing", (), {}))
        with pytest.raises(PluginContractError, match="it is no plugin: it derives from no inter"):
            installed.resolve(plugins={"enable": ["plain:Thing"]})

    def test_the_shared_base_is_not_enough(self, refusal):
        target = component(LogitsPlugin, phase=Phase.MASK)
        assert "it must derive from LogitsProcessor or SparseLogitsProcessor" in refusal(target)

    def test_missing_methods_are_listed(self, refusal):
        assert refusal(component(LogitsProcessor, apply=None)).endswith(": it lacks apply")

    def test_missing_methods_of_a_sparse_processor(self, refusal):
        target = component(SparseLogitsProcessor, edits=None, phase=Phase.MASK)
        assert refusal(target).endswith(": it lacks edits")

    def test_no_phase(self, refusal):
        message = refusal(component(LogitsProcessor, phase=None))
        assert "it states no phase; add `phase = Phase.TRUNCATE` (or another)" in message

    @pytest.mark.parametrize("base", [object, PluginArguments])
    def test_options_of_the_wrong_base(self, refusal, base):
        target = component(LogitsProcessor, Options=type("Options", (base,), {}))
        assert refusal(target).endswith("its Options must derive from hardpoint.plugins.Options")

    @pytest.mark.parametrize("base", [object, PluginOptions])
    def test_arguments_of_the_wrong_base(self, refusal, base):
        target = component(LogitsProcessor, Arguments=type("Arguments", (base,), {}))
        assert refusal(target).endswith(
            "its Arguments must derive from hardpoint.plugins.Arguments"
        )

    def test_what_prepare_returns_derives_from_the_arguments(self, refusal):
        own, other = (type("Arguments", (PluginArguments,), {}) for _ in range(2))
        prepare = classmethod(lambda cls, arguments, context: arguments)
        target = component(LogitsProcessor, Arguments=own, Prepared=other, prepare=prepare)
        assert refusal(target).endswith("its Prepared must derive from its Arguments")

    def test_what_nothing_prepares(self, refusal):
        own = type("Arguments", (PluginArguments,), {})
        target = component(LogitsProcessor, Arguments=own, Prepared=type("Prepared", (own,), {}))
        assert refusal(target).endswith(
            "it has Prepared but no prepare that returns it; add prepare"
        )

    def test_arguments_that_every_request_has_need_defaults(self, refusal):
        needed = type("Arguments", (PluginArguments,), {"__annotations__": {"by": float}})
        target = component(OutputParser, roles=("reasoning",), Arguments=needed)
        assert refusal(target, kind="reasoning_parsers").endswith(
            "every request uses it, also without arguments, so its Arguments.by needs a default"
        )

    def test_a_step_part_may_be_used_by_requests_with_arguments_alone(self, refusal, installed):
        needed = type("Arguments", (PluginArguments,), {"__annotations__": {"by": float}})
        message = refusal(component(StepPart, Arguments=needed), kind="step_parts")
        assert message.endswith(
            "every request uses it, also without arguments, so its Arguments.by needs a default; "
            "or add `named_only = True` to the class: then requests that give arguments use it"
        )
        installed.offer("step_parts/dry", component(StepPart, Arguments=needed, named_only=True))
        assert installed.resolve(plugins={"enable": ["dry"]}).get("step_parts", "dry")

    @pytest.mark.parametrize(
        ("kind", "interface", "attributes", "tables"),
        [
            (
                "reasoning_parsers",
                OutputParser,
                {"roles": ("reasoning",)},
                {"plugins": {"enable": ["dry"]}},
            ),
            ("samplers", Sampler, {}, {"sampler": SamplerConfig(use="dry")}),
            (
                "scheduling_policies",
                SchedulingPolicy,
                {},
                {"scheduler": SchedulerConfig(policy="dry")},
            ),
        ],
    )
    def test_every_request_uses_some_kinds(self, installed, kind, interface, attributes, tables):
        needed = type("Arguments", (PluginArguments,), {"__annotations__": {"by": float}})
        target = component(interface, Arguments=needed, named_only=True, **attributes)
        installed.offer(f"{kind}/dry", target)
        with pytest.raises(PluginContractError, match=r"its Arguments.by needs a default$"):
            installed.resolve(**tables)

    def test_arguments_of_a_kind_that_takes_none(self, refusal):
        target = component(Model, Arguments=PluginArguments)
        assert refusal(target, kind="models").endswith(
            "it has Arguments, but requests give none to a component of its kind; expected Options"
        )

    def test_options_that_are_no_class(self, refusal):
        assert "its Options must derive from" in refusal(component(LogitsProcessor, Options={}))


CLASS_ATTRIBUTES = [
    ("attention_backends", "attention.use", AttentionBackend, {"devices": None},
     'it states no devices; add `devices = ("cpu",)` (or another) to the class'),
    ("attention_backends", "attention.use", AttentionBackend, {"devices": "cpu"},
     "it must be a tuple of names, got 'cpu'"),
    ("attention_backends", "attention.use", AttentionBackend, {"kv_layout": 5},
     "its kv_layout must be a string, got 5"),
    ("scheduling_policies", "scheduler.policy", SchedulingPolicy, {"state_format": 1},
     "its state_format must be a string, got 1"),
    ("eviction_policies", "kv_cache.eviction", EvictionPolicy, {"evict": 5},
     "its evict must be a method, got 5"),
    ("tokenizers", "tokenizer.use", Tokenizer, {"eos_token_ids": lambda self: [1]},
     "its eos_token_ids is a method; write @property above its def"),
    ("executors", "executor.use", Executor, {"max_concurrent_batches": lambda self: 2},
     "its max_concurrent_batches is a method; write @property above its def"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "interface", "stated", "pattern"), CLASS_ATTRIBUTES)
def test_what_a_class_states_is_checked(installed, kind, path, interface, stated, pattern):
    installed.offer(f"{kind}/dry", component(interface, **stated))
    table, field = path.split(".")
    with pytest.raises(PluginContractError) as error:
        installed.resolve(**{table: {field: "dry"}})
    assert str(error.value).startswith(WHO)
    assert pattern in str(error.value)


class TestVersion:
    def test_missing(self, refusal):
        message = refusal(component(LogitsProcessor, contract=None))
        assert message.endswith(
            "it states no contract version; add `contract = 1` to its class body"
        )

    def test_is_not_inherited(self, refusal):
        child = type("Child", (component(LogitsProcessor),), {})
        assert "add `contract = 1` to its class body" in refusal(child)

    @pytest.mark.parametrize("version", [0, 2, "1", True, 1.0, 1.5])
    def test_wrong(self, refusal, version):
        message = refusal(component(LogitsProcessor, contract=version))
        assert message.endswith(
            f"it was written for version {version!r} of the logits_processors contract; "
            f"this Hardpoint accepts 1"
        )

    def test_of_a_hook_module(self, installed):
        @hookimpl
        def engine_closing():
            """Nothing."""

        module = installed.module("hooky", engine_closing=engine_closing)
        installed.offer("hooks/hooky", module)
        with pytest.raises(PluginContractError, match="add `contract = 1` to its module"):
            installed.resolve(plugins={"enable": ["hooky"]})
        module.contract = 1
        assert installed.resolve(plugins={"enable": ["hooky"]}).hooks().has("engine_closing")

    def test_of_a_module_without_hooks(self, installed):
        installed.offer("hooks/hooky", installed.module("hooky", contract=1))
        with pytest.raises(PluginContractError, match="it marks no function with hookimpl"):
            installed.resolve(plugins={"enable": ["hooky"]})


class TestCreate:
    def create(self, installed, target, **config):
        installed.offer("samplers/dry", target)
        plugins = installed.resolve(sampler={"use": "dry"}, **config)
        return plugins.create(
            plugins.one("samplers"), SamplerContext, device=None, vocab_size=7, ops=None
        )

    def test_gets_its_context_and_checked_options(self, installed):
        class Options(PluginOptions):
            strength: int = 1

        target = component(Sampler, Options=Options)
        built = self.create(installed, target, plugin={"dry": {"strength": 5}})
        assert built.name == "dry"
        assert built.options == Options(strength=5)
        assert built.context.vocab_size == 7

    def test_a_constructor_that_fails_is_the_plugins(self, installed):
        def fail(self, context):
            raise KeyError("weights")

        with pytest.raises(PluginLoadError) as error:
            self.create(installed, component(Sampler, __init__=fail))
        assert str(error.value).startswith(WHO)
        assert str(error.value).endswith("its constructor failed: KeyError: 'weights'")
        assert isinstance(error.value.__cause__, KeyError)

    def test_an_error_of_ours_passes_as_it_is(self, installed):
        def fail(self, context):
            raise EngineClosedError("closed")

        with pytest.raises(EngineClosedError, match=r"^closed$"):
            self.create(installed, component(Sampler, __init__=fail))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DryPenalty", "dry_penalty"),
        ("TopA", "top_a"),
        ("MinP", "min_p"),
        ("HTTPSink", "http_sink"),
        ("GGUFLoader2", "gguf_loader2"),
        ("plain", "plain"),
    ],
)
def test_names_from_classes(name, expected):
    assert snake_case(name) == expected


class TestSlips:
    """Slips in what a logits processor states, which would go unnoticed later."""

    @pytest.mark.parametrize(
        ("stated", "pattern"),
        [
            ({"phase": "bias"}, "it states no phase; add"),
            ({"phase": 7}, "it states no phase; add"),
            ({"before": "top_k"}, "its before must be a tuple of names, got 'top_k'"),
            ({"after": (1,)}, "its after must be a tuple of names, got"),
            ({"reads": "logits"}, "its reads must be one of hardpoint.plugins.Reads"),
            (
                {"params_fields": ("nope",)},
                "its params_fields name 'nope', which SamplingParams does not have",
            ),
            (
                {"advance": lambda self, state, token: state},
                "it has advance but no start, so there is no state to carry on; add start",
            ),
        ],
    )
    def test_is_refused(self, installed, stated, pattern):
        value = installed.offer("logits_processors/slip", component(LogitsProcessor, **stated))
        with pytest.raises(PluginContractError) as error:
            installed.resolve(plugins={"enable": [value]})
        assert pattern in str(error.value)

    def test_a_constructor_that_forgets_its_base(self, installed):
        forgets = component(LogitsProcessor, __init__=lambda self, context: None)
        value = installed.offer("logits_processors/slip", forgets)
        plugins = installed.resolve(plugins={"enable": [value]})
        with pytest.raises(PluginContractError, match=r"must call super\(\).__init__\(context\)"):
            plugins.create(plugins.get("logits_processors", "slip"), Context)


class TestMembers:
    def test_a_method_is_not_async(self, refusal):
        async def apply(self, logits, rows):
            return logits

        message = refusal(component(LogitsProcessor, apply=apply))
        assert "its apply is async, which nothing awaits; expected a plain method" in message

    @pytest.mark.parametrize("name", ["argmax_invariant", "supports_drafts"])
    def test_a_flag_is_true_or_false(self, refusal, name):
        message = refusal(component(BatchLogitsProcessor, **{name: "yes"}))
        assert f"its {name} must be True or False, got 'yes'" in message

    def test_a_function_of_python_itself_is_no_plugin(self, installed):
        with pytest.raises(PluginContractError, match="'system' .*: it is no plugin: it derives"):
            installed.resolve(plugins={"enable": ["os:system"]})

"""Plugins for other engines are recognised by their form, and refused by their name."""

from __future__ import annotations

import abc
import enum
import subprocess
import sys
from dataclasses import dataclass, replace
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from support.plugins import foreign_processors as foreign

from hardpoint.errors import PluginContractError, PluginLoadError
from hardpoint.host.registry.adapt import adapter_of
from hardpoint.host.registry.adapters.vllm_objects import ExternalParams
from hardpoint.host.registry.adapters.vllm_v1 import MoveDirectionality
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    BatchUpdate,
    ConfigError,
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    Move,
    Phase,
    SamplingParams,
    hookimpl,
)
from hardpoint.plugins.sampling.logits import FollowsBatch
from hardpoint.plugins.sampling.rows import Added, Moved


@pytest.fixture
def loaded(installed):
    """Enables a target by FQCN as `thing`; returns the set of plugins and the class."""

    def run(target, options=None, **plugins):
        installed.module("elsewhere", Thing=target)
        use = {"use": "elsewhere:Thing", "name": "thing"}
        options = {"thing": options} if options else {}
        plugins = installed.resolve(plugins={"enable": [use], **plugins}, plugin=options)
        return plugins, plugins.target(plugins.get("logits_processors", "thing"))

    return run


@pytest.fixture
def refused(loaded):
    """Returns the message with which a target is refused."""

    def run(target, options=None, error=PluginContractError):
        with pytest.raises(error) as caught:
            loaded(target, options)
        return str(caught.value)

    return run


def built(plugins, **fields):
    entry = plugins.get("logits_processors", "thing")
    sizes = {"device": torch.device("cpu"), "vocab_size": 11, "max_num_seqs": 4, "ops": None}
    return plugins.create(entry, LogitsContext, **{**sizes, **fields})


@pytest.mark.parametrize(
    ("target", "form", "adapter", "phase", "invariant"),
    [
        (foreign.MinP, FollowsBatch, "vLLM V1 class", Phase.TRUNCATE, True),
        (foreign.OneToken, FollowsBatch, "vLLM V1 class", Phase.BIAS, False),
        (foreign.Shy, FollowsBatch, "vLLM V1 class", Phase.BIAS, False),
        (foreign.SlotToken, FollowsBatch, "vLLM V2 class", Phase.PENALTY, False),
        (foreign.Echo, FollowsBatch, "vLLM V2 class", Phase.PENALTY, False),
        (foreign.BothForms, FollowsBatch, "vLLM V2 class", Phase.PENALTY, False),
        (foreign.Counting, LogitsProcessor, "transformers LogitsProcessor", Phase.PENALTY, False),
        (foreign.counting, LogitsProcessor, "transformers LogitsProcessor", Phase.PENALTY, False),
        (foreign.repetition, LogitsProcessor, "transformers LogitsProcessor", Phase.PENALTY, False),
        (foreign.both, LogitsProcessor, "transformers LogitsProcessor", Phase.PENALTY, False),
        (foreign.forcing, LogitsProcessor, "per-request callables", Phase.BIAS, False),
        (foreign.Stepping, LogitsProcessor, "per-request callables", Phase.BIAS, False),
        (foreign.two_parameters, LogitsProcessor, "vLLM V0 callable", Phase.BIAS, False),
        (foreign.Boost, LogitsProcessor, "vLLM V0 callable", Phase.BIAS, False),
        (foreign.boost, LogitsProcessor, "vLLM V0 callable", Phase.BIAS, False),
    ],
)
def test_accepted_forms(loaded, target, form, adapter, phase, invariant):
    _, cls = loaded(target)
    assert issubclass(cls, form)
    assert adapter_of(cls) == adapter
    assert (cls.phase, cls.argmax_invariant) == (phase, invariant)
    assert not cls.uses(SamplingParams())


def test_the_phase_and_who_uses_it_can_be_chosen(loaded):
    plugins, cls = loaded(foreign.OneToken, {"phase": "force", "every_request": True})
    assert cls.phase is Phase.FORCE
    assert cls.uses(SamplingParams())
    assert plugins.entries("logits_processors")[-1].name == "thing"


def test_a_manifest_alone_gives_the_same_component(loaded):
    """As another process loads it."""
    here, _ = loaded(foreign.OneToken, {"phase": "mask", "every_request": True})
    there = PluginSet(here.manifest, (), {})
    cls = there.target(there.get("logits_processors", "thing"))
    assert (cls.phase, cls.every_request, cls.adapter) == (Phase.MASK, True, "vLLM V1 class")


def test_constructor_arguments_come_from_the_options(loaded, refused):
    loaded(foreign.Repetition, {"args": {"penalty": 1.2}})
    message = refused(foreign.Repetition, {"args": {"factor": 2}}, ConfigError)
    assert message.startswith("plugin.thing.args: they do not fit Repetition(penalty): ")
    assert "'penalty'" in refused(foreign.Repetition, None, ConfigError)
    message = refused(foreign.repetition, {"args": {"penalty": 2}}, ConfigError)
    assert message.startswith("plugin.thing.args: elsewhere:Thing is built already")
    message = refused(foreign.PerRequestClass, None, ConfigError)
    assert message.startswith(
        "plugin.thing.args: they do not fit PerRequestClass(tokenizer, boost=1.0): missing a "
        "required argument: 'tokenizer'"
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            foreign.TwoArguments,
            "a logits processor for vLLM, but of no form that is known: its constructor is "
            "TwoArguments(vllm_config, device); a V1 class has is_argmax_invariant, update_state, "
            "apply and the constructor (vllm_config, device, is_pin_memory), a V2 class has "
            "apply(logits, ctx) and the constructor (vllm_config, req_states)",
        ),
        (
            foreign.OldApply,
            "of no form that is known: it lacks is_argmax_invariant, update_state, and its "
            "constructor is OldApply(vllm_config, req_states); a V1 class has",
        ),
        (foreign.SlotValidation, "its validate_params must be a classmethod or staticmethod"),
        (foreign.InstanceValidation, "its validate_params must be a classmethod or staticmethod"),
        (
            foreign.four_parameters,
            "it must take exactly one positional parameter, (params), this is "
            "four_parameters(prompt_ids, output_ids, logits, scale); it seems to be such a "
            "callable itself, or a class of them",
        ),
        (foreign.with_default, "with_default(params, scale=1.0): 'scale' has a default"),
        (lambda *params: None, "<lambda>(*params): 'params' is variadic"),
        (lambda: None, "this is <lambda>()"),
        (lambda *, params: None, "<lambda>(*, params): 'params' is keyword-only"),
        (max, "this is max, whose signature Python cannot read"),
        (type("Plain", (), {}), "it is no plugin: it derives from no interface"),
        (3, "it is no plugin: it derives from no interface"),
    ],
)
def test_refused_forms(refused, target, expected):
    message = refused(target)
    assert message.startswith("plugin 'thing' (") or message.startswith("plugin 'Thing'")
    assert expected in message


class Raising(type):
    def __getattr__(cls, name):
        raise LookupError(name)


class Unreadable(foreign.OneToken, metaclass=Raising):
    """A metaclass of its own fails."""


def test_a_class_that_cannot_be_looked_at_is_named(refused):
    assert "looking at it failed: LookupError: __wrapped__" in refused(Unreadable)


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


def test_an_abstract_class_lacks_something(refused):
    class Base(foreign.OneToken, abc.ABC):
        @abc.abstractmethod
        def score(self):
            """Not there yet."""

    assert refused(Base).endswith("it lacks score")


def test_a_foreign_form_of_another_kind_is_no_plugin(installed):
    value = installed.offer("models/Foreign", foreign.OneToken)
    with pytest.raises(PluginContractError, match="models must be classes derived from"):
        installed.resolve(plugins={"replace": {"LlamaForCausalLM": value}})


def test_a_class_that_grows_less_invariant_is_refused(loaded):
    plugins, cls = loaded(foreign.Fickle)
    assert cls.argmax_invariant
    with pytest.raises(PluginLoadError, match="True before its constructor ran and False after"):
        built(plugins)


def test_the_configuration_lists_what_it_has(loaded):
    plugins, _ = loaded(foreign.ReadsConfig)
    with pytest.raises(PluginLoadError) as error:
        built(plugins)
    assert "'thing'" in str(error.value)
    assert "has no 'parallel_config'; it has scheduler_config.max_num_seqs" in str(error.value)


class Recorder(foreign.OneToken):
    def update_state(self, batch_update):
        self.seen = batch_update


def test_a_batch_update_in_vllms_shape(loaded):
    plugins, cls = loaded(Recorder)
    processor = built(plugins)
    mine = SamplingParams(min_p=0.3, plugin_args={"thing": cls.Arguments(extra_args={"x": 1})})
    other = SamplingParams(min_p=0.4)
    outputs: list[int] = []
    update = BatchUpdate(
        batch_size=3,
        removed=(4, 3),
        added=(Added(0, mine, [1, 2], outputs), Added(1, other, None, [])),
        moved=(Moved(5, 2, Move.UNIDIRECTIONAL), Moved(0, 1, Move.SWAP)),
    )
    processor.update_state(update)
    seen = processor._inner.seen
    assert (seen.batch_size, seen.removed) == (3, (4, 3))
    (row, params, prompt, live), (_, blank, none, _) = seen.added
    assert (row, params.min_p, params.extra_args, prompt) == (0, 0.3, {"x": 1}, [1, 2])
    assert live == []
    outputs.append(7)
    processor.update_state(None)
    assert live == [7]
    assert (blank.min_p, blank.extra_args, none) == (0.0, None, None)
    assert [m[:2] for m in seen.moved] == [(5, 2), (0, 1)]
    assert seen.moved[0][2] == foreign.MoveDirectionality.UNIDIRECTIONAL
    assert seen.moved[1][2] == foreign.MoveDirectionality.SWAP
    assert seen.moved[0][2] != foreign.MoveDirectionality.SWAP
    processor.update_state(None)
    assert processor._inner.seen is None


@dataclass
class SeveralRows:
    """The rows of a step."""

    requests: list[LogitsRequest]


@pytest.mark.parametrize("seed", range(8))
def test_the_rows_stay_true_through_any_history(loaded, seed):
    """Against a plain list of who stands where; rows are added, left, moved and swapped."""
    plugins, cls = loaded(foreign.OneToken)
    processor = built(plugins, max_num_seqs=6)
    random = Random(seed)
    standing: list[int | None] = [None] * 6
    for _ in range(60):
        leaving = [row for row in range(6) if standing[row] is not None and random.random() < 0.2]
        for row in leaving:
            standing[row] = None
        added = []
        for row in random.sample(range(6), random.randrange(3)):
            target = random.choice([None, random.randrange(11)])
            extra = {} if target is None else {"target_token": target}
            params = SamplingParams(plugin_args={"thing": cls.Arguments(extra_args=extra)})
            added.append(Added(row, params, [1], []))
            standing[row] = target
        moved = []
        for _ in range(random.randrange(3)):
            source, destination = random.sample(range(6), 2)
            direction = random.choice(list(Move))
            moved.append(Moved(source, destination, direction))
            there, here = standing[source], standing[destination]
            standing[destination] = there
            standing[source] = here if direction is Move.SWAP else None
        removed = tuple(sorted(set(leaving) - {a.row for a in added}, reverse=True))
        processor.update_state(BatchUpdate(6, removed, tuple(added), tuple(moved)))
        before = torch.rand(6, 11)
        users = [row for row, target in enumerate(standing) if target is not None]
        views = [LogitsRequest("r", [1], [], SamplingParams(), [], row=row) for row in users]
        after = before.clone()
        if users:
            after[users] = processor.apply(before[users], SeveralRows(views))
        for row, target in enumerate(standing):
            if target is None:
                assert after[row].equal(before[row])
            else:
                assert after[row].isfinite().nonzero().view(-1).tolist() == [target]


def test_vllms_own_directions_are_used_where_it_is_installed(loaded, installed):
    class Directions(enum.Enum):
        UNIDIRECTIONAL = 1
        SWAP = 2

    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        installed.module(name)
    installed.module("vllm.v1.sample.logits_processor", MoveDirectionality=Directions)
    plugins, _ = loaded(Recorder)
    processor = built(plugins)
    processor.update_state(BatchUpdate(1, moved=(Moved(1, 0, Move.SWAP),)))
    assert processor._inner.seen.moved[0][2] is Directions.SWAP


def test_directions_equal_by_name_only():
    assert MoveDirectionality.SWAP != enum.Enum("Other", "UNIDIRECTIONAL SWAP").SWAP
    assert MoveDirectionality.SWAP != 2
    assert len({MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL}) == 2


def test_a_subclass_of_vllms_class_is_taken_for_one(refused):
    base = type("LogitsProcessor", (), {"__module__": "vllm.v1.worker.gpu.sample"})
    message = refused(type("Mine", (base,), {}))
    assert "it lacks is_argmax_invariant, update_state, apply" in message


def test_sampling_parameters_as_others_read_them():
    params = ExternalParams(SamplingParams(top_k=3, stop="end"), {}, [1, 2])
    assert (params.top_k, params.stop, params.extra_args) == (3, ["end"], None)
    assert params.all_stop_token_ids == {1, 2}
    with pytest.raises(AttributeError, match="have no 'guided_json'; arguments of a plugin's own"):
        _ = params.guided_json


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


def foreign_point(installed, monkeypatch, value):
    """Offer `tokens` under vLLM's group, in addition to what is installed."""

    class Point:
        group, name = "vllm.logits_processors", "tokens"

        class dist:  # noqa: N801
            name, version = "acme-vllm", "3.0"

    Point.value = value
    monkeypatch.setattr("importlib_metadata.entry_points", lambda: [Point])


def test_foreign_groups_are_looked_into_when_configured(installed, monkeypatch):
    from hardpoint.host.registry.discovery import discover

    target = "support.plugins.foreign_processors:OneToken"
    foreign_point(installed, monkeypatch, target)
    assert discover() == []
    (found,) = discover(["vllm.logits_processors"])
    assert found.label == f"logits_processors/tokens (acme-vllm 3.0, {target})"
    installed.found.append(found)
    plugins = installed.resolve()
    assert found in plugins.not_enabled()
    plugins = installed.resolve(plugins={"enable": ["tokens"]})
    entry = plugins.get("logits_processors", "tokens")
    assert adapter_of(plugins.target(entry)) == "vLLM V1 class"


def test_the_contract_imports_no_torch():
    script = (
        "import sys, hardpoint.plugins, hardpoint.host.registry.adapt;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


class Greeter:
    """Hooks, which happen to be callable."""

    contract = 1

    @hookimpl
    def engine_closing(self):
        """Do nothing."""

    def __call__(self, params):
        return None


def test_hooks_and_modules_are_left_alone(installed, refused):
    assert "it is no plugin" in refused(ModuleType("empty"))
    installed.module("greeting", Greeter=Greeter)
    plugins = installed.resolve(plugins={"enable": ["greeting:Greeter"]})
    assert plugins.target(plugins.one("hooks")) is Greeter

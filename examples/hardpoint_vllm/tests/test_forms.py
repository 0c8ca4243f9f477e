"""vLLM's logits processors are recognized by their form, and near misses are refused."""

import abc
import enum
import os
import sys
from dataclasses import dataclass
from random import Random
from types import ModuleType

import foreign
import pytest
import torch
from hardpoint_vllm import VLLM
from hardpoint_vllm.batch_classes import MoveDirectionality
from hardpoint_vllm.objects import ExternalParams

from hardpoint.errors import ConfigError, PluginContractError
from hardpoint.plugins import (
    BatchUpdate,
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    Move,
    Phase,
    SamplingParams,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.sampling import Added, FollowsBatch, Moved

SOURCE = Source.of_module("thing", "elsewhere:Thing", "a test")


def load(target, options=None):
    """Return the component of an object, with options."""
    assert VLLM.matches(target, "logits_processors") is True
    component = VLLM.adapt(target, SOURCE)
    return component.configured(component.Options(**(options or {})))


def refusal(target, options=None, error=PluginContractError):
    """Return the message with which an object is refused."""
    with pytest.raises(error) as caught:
        load(target, options)
    return str(caught.value)


def built(cls, **fields):
    sizes = {"device": torch.device("cpu"), "vocab_size": 11, "max_num_seqs": 4, "ops": None}
    return cls(LogitsContext(name="thing", options=cls.Options(), **{**sizes, **fields}))


@pytest.mark.parametrize(
    ("target", "form", "adapter", "phase", "invariant"),
    [
        (foreign.MinP, FollowsBatch, "vLLM V1 class", Phase.TRUNCATE, True),
        (foreign.OneToken, FollowsBatch, "vLLM V1 class", Phase.BIAS, False),
        (foreign.Shy, FollowsBatch, "vLLM V1 class", Phase.BIAS, False),
        (foreign.SlotToken, FollowsBatch, "vLLM V2 class", Phase.PENALTY, False),
        (foreign.Echo, FollowsBatch, "vLLM V2 class", Phase.PENALTY, False),
        (foreign.BothForms, FollowsBatch, "vLLM V2 class", Phase.PENALTY, False),
        (foreign.forcing, LogitsProcessor, "per-request callables", Phase.BIAS, False),
        (foreign.Stepping, LogitsProcessor, "per-request callables", Phase.BIAS, False),
        (foreign.two_parameters, LogitsProcessor, "vLLM V0 callable", Phase.BIAS, False),
        (foreign.Boost, LogitsProcessor, "vLLM V0 callable", Phase.BIAS, False),
        (foreign.boost, LogitsProcessor, "vLLM V0 callable", Phase.BIAS, False),
    ],
)
def test_accepted_forms(target, form, adapter, phase, invariant):
    cls = load(target)
    assert issubclass(cls, form)
    assert cls.adapter == adapter
    assert (cls.phase, cls.argmax_invariant) == (phase, invariant)
    assert not cls.uses(SamplingParams())


def test_the_phase_and_who_uses_it_can_be_chosen():
    cls = load(foreign.OneToken, {"phase": "force", "every_request": True})
    assert cls.phase is Phase.FORCE
    assert cls.uses(SamplingParams())


def test_constructor_arguments_come_from_the_options():
    load(foreign.Boost, {"args": {"token": 70}})
    message = refusal(foreign.Boost, {"args": {"factor": 2}}, ConfigError)
    assert message.startswith("plugin.thing.args: they do not fit Boost(token=65, verbose=False): ")
    message = refusal(foreign.boost, {"args": {"token": 2}}, ConfigError)
    assert message.startswith("plugin.thing.args: elsewhere:Thing is built already")
    message = refusal(foreign.PerRequestClass, None, ConfigError)
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
        (os.system, "the function system of Python itself"),
        (max, "this is max, without a readable signature"),
    ],
)
def test_refused_forms(target, expected):
    message = refusal(target)
    assert message.startswith("plugin 'thing' (")
    assert expected in message


@pytest.mark.parametrize("target", [type("Plain", (), {}), 3, sys, None])
def test_other_objects_do_not_match(target):
    assert VLLM.matches(target, None) is False


def test_callables_match_as_logits_processors_alone():
    assert VLLM.matches(foreign.forcing, None) is True
    assert VLLM.matches(foreign.forcing, "models") is False
    assert VLLM.matches(foreign.OneToken, "models") is False


def test_an_abstract_class_lacks_something():
    class Base(foreign.OneToken, abc.ABC):
        @abc.abstractmethod
        def score(self):
            """Not there yet."""

    assert refusal(Base).endswith("it lacks score")


def test_a_class_that_grows_less_invariant_is_refused():
    cls = load(foreign.Fickle)
    assert cls.argmax_invariant
    with pytest.raises(ValueError, match="True before its constructor ran and False after"):
        built(cls)


def test_the_configuration_lists_what_it_has():
    with pytest.raises(LookupError) as error:
        built(load(foreign.ReadsConfig))
    assert "has no 'parallel_config'; it has scheduler_config.max_num_seqs" in str(error.value)


class Recorder(foreign.OneToken):
    def update_state(self, batch_update):
        self.seen = batch_update


def test_a_batch_update_in_vllms_shape():
    cls = load(Recorder)
    processor = built(cls)
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
def test_the_rows_stay_true_through_any_history(seed):
    """Against a plain list of who stands where; rows are added, left, moved and swapped."""
    cls = load(foreign.OneToken)
    processor = built(cls, max_num_seqs=6)
    random = Random(seed)
    owners: list[int | None] = [None] * 6
    for _ in range(60):
        leaving = [row for row in range(6) if owners[row] is not None and random.random() < 0.2]
        for row in leaving:
            owners[row] = None
        added = []
        for row in random.sample(range(6), random.randrange(3)):
            target = random.choice([None, random.randrange(11)])
            extra = {} if target is None else {"target_token": target}
            params = SamplingParams(plugin_args={"thing": cls.Arguments(extra_args=extra)})
            added.append(Added(row, params, [1], []))
            owners[row] = target
        moved = []
        for _ in range(random.randrange(3)):
            source, destination = random.sample(range(6), 2)
            direction = random.choice(list(Move))
            moved.append(Moved(source, destination, direction))
            current, other = owners[source], owners[destination]
            owners[destination] = current
            owners[source] = other if direction is Move.SWAP else None
        removed = tuple(sorted(set(leaving) - {a.row for a in added}, reverse=True))
        processor.update_state(BatchUpdate(6, removed, tuple(added), tuple(moved)))
        before = torch.rand(6, 11)
        users = [row for row, target in enumerate(owners) if target is not None]
        views = [LogitsRequest("r", [1], [], SamplingParams(), [], row=row) for row in users]
        after = before.clone()
        if users:
            after[users] = processor.apply(before[users], SeveralRows(views))
        for row, target in enumerate(owners):
            if target is None:
                assert after[row].equal(before[row])
            else:
                assert after[row].isfinite().nonzero().view(-1).tolist() == [target]


def test_vllms_own_directions_are_used_where_it_is_installed(monkeypatch):
    class Directions(enum.Enum):
        UNIDIRECTIONAL = 1
        SWAP = 2

    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("vllm.v1.sample.logits_processor")
    module.MoveDirectionality = Directions
    monkeypatch.setitem(sys.modules, module.__name__, module)
    processor = built(load(Recorder))
    processor.update_state(BatchUpdate(1, moved=(Moved(1, 0, Move.SWAP),)))
    assert processor._inner.seen.moved[0][2] is Directions.SWAP


def test_directions_equal_by_name_only():
    assert MoveDirectionality.SWAP != enum.Enum("Other", "UNIDIRECTIONAL SWAP").SWAP
    assert MoveDirectionality.SWAP != 2
    assert len({MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL}) == 2


def test_a_subclass_of_vllms_class_is_taken_for_one():
    base = type("LogitsProcessor", (), {"__module__": "vllm.v1.worker.gpu.sample"})
    message = refusal(type("Mine", (base,), {}))
    assert "it lacks is_argmax_invariant, update_state, apply" in message


def test_sampling_parameters_as_others_read_them():
    params = ExternalParams(SamplingParams(top_k=3, stop="end"), {}, [1, 2])
    assert (params.top_k, params.stop, params.extra_args) == (3, ["end"], None)
    assert params.all_stop_token_ids == {1, 2}
    with pytest.raises(AttributeError, match="have no 'guided_json'; arguments of a plugin's own"):
        _ = params.guided_json

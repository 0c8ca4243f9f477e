"""A step waits for its device once: where it fetches the sampled tokens."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from support.core.graphs import GraphedOps, PaddedAttention
from support.device_stand_in import DEVICE, StandIn, fake_cuda
from support.driving import FINAL, summary, varied_jobs
from torch._C import DisableTorchFunction

from hardpoint import SamplingParams, plugins
from hardpoint.core.worker import worker
from hardpoint.plugins import (
    BatchLogitsProcessor,
    LogitsProcessor,
    Phase,
    RowMap,
    TensorSpec,
)
from hardpoint.plugins.process.device import HostCopy
from hardpoint.testing import scripted_engine, write_scripted_model

FETCH = ("plugins/process/device.py", "read")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


class NoArguments(plugins.Arguments):
    pass


class Fatigue(LogitsProcessor):
    """Has state on the device."""

    contract = 1
    phase = Phase.PENALTY
    Arguments = NoArguments

    def device_state(self):
        return {"counts": TensorSpec((self.context.vocab_size,), "int32")}

    def start_row(self, request, tensors):
        for token in request.output_token_ids:
            tensors["counts"][token] += 1

    def advance_rows(self, rows, tokens, tensors):
        one = torch.ones_like(tokens, dtype=torch.int32).unsqueeze(1)
        tensors["counts"].scatter_add_(1, tokens.unsqueeze(1), one)

    def apply(self, logits, rows):
        return logits - 0.1 * rows.state_tensor("counts")


class Rivals(BatchLogitsProcessor):
    """Follows the rows of the batch itself."""

    contract = 1
    phase = Phase.BIAS
    Arguments = NoArguments

    @classmethod
    def uses(cls, params):
        return False

    def __init__(self, context):
        super().__init__(context)
        self.arguments = RowMap(lambda added: added.params.plugin_args.get(self.name))

    def update_state(self, update):
        self.arguments.apply(update)

    def apply(self, logits):
        for row in self.arguments:
            logits[row, row] -= 5
        return logits


class Steady(LogitsProcessor):
    """Observes the log-probabilities of its tokens."""

    contract = 1
    phase = Phase.TEMPERATURE
    max_state_bytes = 16
    Arguments = NoArguments

    class State(plugins.State):
        total: float

    def start(self, request):
        return self.State(total=0.0)

    def apply(self, logits, rows):
        return logits * 1.01

    def observe(self, state, token, logprob):
        return self.State(total=state.total + logprob)


class Reading(LogitsProcessor):
    """Reads a value from the device."""

    contract = 1
    phase = Phase.BIAS
    Arguments = NoArguments

    def apply(self, logits, rows):
        return logits - logits.amax().item()


USED = (Fatigue, Rivals, Steady)
FEATURES = [
    {"structured": {"choice": ["red", "reddish"]}, "temperature": 0.0},
    {"structured": {"regex": "[0-9]{4,}"}, "temperature": 1.0, "seed": 4, "logprobs": 3},
    {"structured": {"regex": "[ab]{9}"}, "temperature": 0.0, "allowed_token_ids": [64, 65, 256]},
    {"temperature": 0.0, "min_tokens": 3, "logprobs": -1},
    {"temperature": 0.8, "seed": 3, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "logprobs": 0},
    {
        "temperature": 0.0,
        "plugin_args": {
            "thinking_budget": {"thinking_token_budget": 2, "start": [5], "end": [6, 7]}
        },
    },
    {"temperature": 0.0, "logprobs": 2, "plugin_args": {"fatigue": {}, "steady": {}}},
    {"temperature": 1.0, "seed": 2, "plugin_args": {"rivals": {}, "steady": {}, "fatigue": {}}},
]
"""Of requests; those of `varied_jobs` have other ones."""


class Graphs(GraphedOps):
    """Records steps of stand-ins: what is repeated is no call of torch."""

    contract = 1
    replayable = True

    def record(self, run):
        graph = super().record(run)

        def replay():
            with DisableTorchFunction():
                return graph().as_subclass(StandIn)

        replay.num_bytes = graph.num_bytes
        return replay


def jobs(count):
    own = [
        (f"f{index}", list(range(1, 9 + index)), SamplingParams(max_tokens=8, **fields, **FINAL))
        for index, fields in enumerate(FEATURES)
    ]
    return [*varied_jobs(count), *own]


@pytest.fixture
def folder(tmp_path):
    """A small model with random weights."""
    write_scripted_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **LLAMA}))
    return tmp_path


@pytest.fixture
def device(monkeypatch):
    with fake_cuda(monkeypatch) as stand_in:
        yield stand_in


def settings(extra, processors=USED):
    return {
        "ops": {"use": "torch"},
        "attention": {"use": "torch"},
        "kv_cache": {"num_blocks": 200},
        "plugins": {"enable": [f"{__name__}:{cls.__name__}" for cls in processors]},
        **extra,
        # The stand-in is one of this thread.
        "scheduler": {"asynchronous": False, **extra.get("scheduler", {})},
    }


def run(engine, jobs, after_step=lambda: None, per_step=2):
    """Run jobs, of which so many join before each step."""
    waiting, results = list(jobs), {}
    while waiting or engine.has_unfinished_requests():
        for name, prompt, params in waiting[:per_step]:
            engine.add_request(name, prompt, params)
        waiting = waiting[per_step:]
        results |= {o.request_id: summary(o) for o in engine.step() if o.finished}
        after_step()
    return results


def tokens_of(results):
    return {name: [completion[:2] for completion in one] for name, one in results.items()}


def waits_of_steps(folder, extra, jobs, device, **options):
    """Return the waits of each step, and the results."""
    steps = []

    def after_step():
        steps.append(tuple(device.waits))
        device.waits.clear()

    engine = scripted_engine(folder, {**settings(extra, **options), "device": "cuda"})
    device.waits.clear()
    with contextlib.closing(engine):
        results = run(engine, jobs, after_step)
    return steps, results


def others(steps):
    """Return the waits that are not those for a step's tokens, for a message."""
    return sorted({str(wait) for step in steps for wait in step if wait.place != FETCH})


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 8,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 1.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
STACKS = {
    "defaults": ({}, {}, 5),
    "chunks-of-sliding-windows": (GEMMA, {"scheduler": {"max_num_batched_tokens": 16}}, 0),
    "processed": ({}, {"sampler": {"logprobs": "processed"}}, 0),
}


@pytest.mark.parametrize(("fields", "extra", "count"), STACKS.values(), ids=STACKS)
def test_a_step_waits_once_for_its_tokens(folder, fields, extra, count, device):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    steps, results = waits_of_steps(folder, extra, jobs(count), device)
    assert not others(steps)
    assert {len(step) for step in steps} <= {0, 1}
    assert sum(map(len, steps)) > len(steps) / 2
    assert not any(c[3] == "error" for one in results.values() for c in one)
    engine = scripted_engine(folder, {**settings(extra), "device": "cpu"})
    assert tokens_of(run(engine, jobs(count))) == tokens_of(results)
    engine.close()


def test_a_recorded_step_waits_once_but_for_the_first_checks(folder, device):
    GraphedOps.reset()
    recorded = {
        "ops": {"use": f"{__name__}:Graphs"},
        "attention": {"use": "support.core.graphs:PaddedAttention"},
    }
    steps, results = waits_of_steps(folder, recorded, jobs(4), device)
    assert GraphedOps.replays > len(steps) / 4
    checks = [wait for step in steps for wait in step if wait.place != FETCH]
    assert {wait.place for wait in checks} == {
        ("builtin_plugins/step_parts/recording/decode_graphs.py", "_checked")
    }
    assert len(checks) <= 4
    assert sum(map(len, steps)) <= len(steps) + len(checks)
    engine = scripted_engine(folder, settings({}))
    assert tokens_of(run(engine, jobs(4))) == tokens_of(results)
    engine.close()


class Workspace(PaddedAttention):
    """Notes what steps it allocates memory for."""

    contract = 1
    replayable = True
    pads = True
    planned = []

    def plan(self, step):
        Workspace.planned.append((len(step.seq_lens), step.seq_lens.max(), step.lens.sum()))
        return super().plan(step)


@pytest.mark.parametrize("ops", ["torch", f"{__name__}:Graphs"])
def test_memory_is_measured_with_the_attention_backend(folder, device, ops, caplog):
    """Its memory is that of the longest sequences, which a step of padding has."""
    GraphedOps.reset()
    Workspace.planned.clear()
    parts = {"ops": {"use": ops}, "attention": {"use": f"{__name__}:Workspace"}}
    more = {"max_model_len": 96, "scheduler": {"max_num_seqs": 12}, "device": "cuda"}
    scripted_engine(folder, settings({**parts, **more})).close()
    largest_graph = [] if ops == "torch" else [(8, 96, 0)]
    assert Workspace.planned == [*largest_graph, (12, 96, 0)]
    assert "trial step" not in caplog.text


class FailsOnPadding(PaddedAttention):
    contract = 1
    replayable = True
    pads = True

    def attend(self, spec, cache, plan, *qkv):
        raise KeyError("padding")


def test_a_padded_trial_that_fails_is_told(folder, device, caplog):
    parts = {"ops": {"use": "torch"}, "attention": {"use": f"{__name__}:FailsOnPadding"}}
    scripted_engine(folder, {**settings(parts), "device": "cuda"}).close()
    assert "sequences of padding failed: KeyError: 'padding'" in caplog.text


def test_a_step_with_log_probabilities_of_prompts_waits_once_more(folder, device):
    asking = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2, **FINAL)
    prompts = [(f"p{index}", list(range(1, 251)) * 2, asking) for index in range(2)]
    steps, _ = waits_of_steps(folder, {"max_model_len": 512}, prompts, device)
    assert not others(steps)
    assert [len(step) for step in steps] == [2, 1, 1]


def test_strided_results_are_fetched(device):
    """A sampler's column of a matrix is, for one."""
    with torch.inference_mode():
        logits = torch.rand(3, 4, device="cuda")
        order = logits.argsort(-1, descending=True)
        columns = order[:, 0], logits[:, 1], order[:, 1:3].T
        device.waits.clear()
        lists = HostCopy(columns).read()
        assert len(device.waits) == 1
        assert lists == [column.cpu().tolist() for column in columns]


def test_a_processor_that_reads_a_value_is_named(folder, device):
    reads = SamplingParams(max_tokens=3, temperature=0.0, plugin_args={"reading": {}}, **FINAL)
    steps, _ = waits_of_steps(folder, {}, [("r", [1, 2, 3], reads)], device, processors=(Reading,))
    line = Reading.apply.__code__.co_firstlineno + 1
    where = f"tests/core/worker/test_device_syncs.py:{line} in apply"
    assert others(steps) == [f"{where}: _local_scalar_dense: a number is read"]
    assert [len(step) for step in steps] == [2, 2, 2]


def host(*values):
    return torch.tensor(values or [0, 1])


WAITING = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to-cpu": lambda x: x.to("cpu"),
    "bool": lambda x: bool(x[0] > 1),
    "if": lambda x: 1 if x.any() else 0,
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x.sum()),
    "slice": lambda x: x[: x[1]],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: torch.bincount(x),
    "masked-select": lambda x: torch.masked_select(x, x > 0),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x.float(), x.float()),
    "contains": lambda x: 3 in x,
    "repeat": lambda x: torch.repeat_interleave(x, x),
    "mask": lambda x: x[x > 0],
    "list": lambda x: x[[0, 1]],
    "host-index": lambda x: x[host()],
    "host-value": lambda x: x.__setitem__(slice(2), host()),
    "put-mask": lambda x: x.index_put_((x > 0,), x[:3].clone()),
    "copy": lambda x: x[:2].copy_(host()),
    "copy-back": lambda x: host().copy_(x[:2], non_blocking=True),
    "pageable": lambda x: host().to(x.device, non_blocking=True),
    "pinned-blocking": lambda x: host().pin_memory().to(x.device),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "as-tensor": lambda x: torch.as_tensor(host(), device=x.device),
    "new-tensor": lambda x: x.new_tensor(1),
    "synchronize": lambda x: torch.cuda.synchronize(x.device),
}
QUICK = {
    "arithmetic": lambda x: (x + 1) * x.sum(),
    "int-index": lambda x: x[1] + x[-1],
    "slices": lambda x: x[None, 1:3],
    "device-index": lambda x: x[x.clamp(max=1)],
    "fill-mask": lambda x: x.__setitem__(x > 0, 7),
    "shape": lambda x: len(x) + x.numel() + x.shape[0],
    "made-there": lambda x: torch.full((2,), 3, device=x.device) + torch.zeros_like(x[:2]),
    "host-number": lambda x: x + torch.tensor(3),
    "pinned": lambda x: host().pin_memory().to(x.device, non_blocking=True),
    "empty-pinned": lambda x: x[:2].copy_(
        torch.empty(2, dtype=torch.int64, pin_memory=True), non_blocking=True
    ),
    "repeat-size": lambda x: torch.repeat_interleave(x, 2),
    "host-only": lambda x: host().tolist() + host().nonzero().tolist(),
}


def made(device):
    values = torch.arange(4).pin_memory().to(DEVICE, non_blocking=True)
    assert not device.waits
    return values


@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING)
def test_the_stand_in_notes_what_waits(device, call):
    with torch.inference_mode():  # as steps run, where torch shows less of what it does
        call(made(device))
    assert device.waits
    assert {wait.place[0] for wait in device.waits} == {"tests/core/worker/test_device_syncs.py"}


@pytest.mark.parametrize("call", QUICK.values(), ids=QUICK)
def test_the_stand_in_notes_nothing_else(device, call):
    with torch.inference_mode():
        call(made(device))
    assert not device.waits


def test_stand_ins_keep_apart_from_tensors_of_the_host(device):
    values = made(device)
    assert values.device == torch.empty(1, device="cuda").device == DEVICE
    assert type(values.to(torch.float32)) is type(values + 1) is type(values[1:]) is StandIn
    assert type(values.cpu()) is torch.Tensor
    assert values.cpu().data_ptr() != values.data_ptr()
    with pytest.raises(RuntimeError, match="on the device and on the host"):
        values + torch.arange(4)
    with pytest.raises(RuntimeError, match="on the device and on the host"):
        values.index_select(0, torch.tensor([1]))
    with pytest.raises(TypeError, match="numpy"):
        values.numpy()


@pytest.mark.parametrize(("name", "count"), [("cuda", 1), ("cpu", 0)])
def test_sampling_is_warm_before_the_first_request(folder, name, count, device, monkeypatch):
    calls = []
    monkeypatch.setattr(worker, "warm_up", lambda *arguments: calls.append(arguments))
    engine = scripted_engine(folder, {**settings({}), "device": name})
    engine.close()
    assert [(size, there.type) for _, size, there in calls] == [
        (LLAMA["vocab_size"], "cuda")
    ] * count

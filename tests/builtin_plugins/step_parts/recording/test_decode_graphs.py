"""Recorded decode steps in a few sizes return the same as the model."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import re
import shutil
import weakref

import pytest
import torch
from support.cases import nightly_but
from support.core import graphs
from support.core.graphs import GraphedOps, RoundingOps, graphed_script
from support.driving import alone, run, varied_jobs
from support.internals import core_of, engine_of

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.ops.cuda_graphs import RepeatedRun
from hardpoint.builtin_plugins.ops.native_cpu import NativeOps
from hardpoint.builtin_plugins.step_parts.recording.decode_graphs import relative_difference
from hardpoint.errors import PluginFaultError
from hardpoint.testing import scripted_engine, write_scripted_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 8,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN_MOE = LLAMA | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
PROMPTS = [{"prompt_token_ids": list(range(1, 2 + count))} for count in (3, 9, 20, 1, 33)]
EAGER = {"executor": {"enforce_eager": True}}


def graphed(name):
    return {"use": f"{graphs.__name__}:{name}"}


@pytest.fixture(autouse=True)
def fresh():
    GraphedOps.reset()
    yield
    GraphedOps.reset()


@pytest.fixture
def generate(tmp_path):
    """Return a function that gives tokens and log-probabilities of three rounds of requests."""
    write_scripted_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def generate(
        model=LLAMA,
        ops="GraphedOps",
        between=lambda llm: None,
        tokens=12,
        rounds=(PROMPTS[:3], PROMPTS, PROMPTS[2:4]),
        routed_experts=False,
        **extra,
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **model}))
        settings = {
            "load": {"use": "dummy"},
            "ops": {"use": ops if ops.islower() else f"{graphs.__name__}:{ops}"},
            "attention": {"use": f"{graphs.__name__}:PaddedAttention"},
            **extra,
        }
        with LLM(str(tmp_path), dtype="float32", config=settings, progress=False) as llm:
            outputs = []
            for prompts in rounds:
                params = [
                    SamplingParams(
                        max_tokens=tokens + 3 * index,
                        ignore_eos=True,
                        logprobs=1,
                        seed=index,
                        routed_experts=routed_experts,
                    )
                    for index in range(len(prompts))
                ]
                outputs += llm.generate(prompts, params)
                between(llm)
        return [output.outputs[0] for output in outputs]

    return generate


def same(results, expected):
    """Whether tokens are the same, and log-probabilities but for rounding."""
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    for result, other in zip(results, expected, strict=True):
        for token, mine, theirs in zip(
            result.token_ids, result.logprobs, other.logprobs, strict=True
        ):
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
    return True


SMALL_POOL = {"kv_cache": {"num_blocks": 9}, "max_model_len": 128}
STACKS = {
    "defaults": (LLAMA, {}),
    "chunks": (LLAMA, {"scheduler": {"max_num_batched_tokens": 16}}),
    "preempting": (LLAMA, SMALL_POOL),
    "no-prefix-cache": (LLAMA, {"kv_cache": {"prefix_caching": False, "block_size": 4}}),
    "more-than-the-largest-size": (LLAMA, {"scheduler": {"max_num_seqs": 64}}),
    "experts": (MIXTRAL, {}),
    "shared-experts": (QWEN_MOE, {}),
    "window-groups": (GEMMA, {"kv_cache": {"block_size": 4}}),
    "steps-under-way": (LLAMA, {"executor": {"use": "support.plugins.observing:TwoBatches"}}),
}


@pytest.mark.parametrize(
    "stack",
    nightly_but(
        STACKS,
        "preempting",
        "more-than-the-largest-size",
        "shared-experts",
        "window-groups",
        "steps-under-way",
    ),
)
def test_recorded_steps_give_the_same(generate, caplog, monkeypatch, stack):
    model, extra = STACKS[stack]
    if extra.get("scheduler", {}).get("max_num_seqs"):
        monkeypatch.setattr(GraphedOps, "sizes", (2,))
    eager = extra | {"executor": extra.get("executor", {}) | EAGER["executor"]}
    expected = generate(model, **eager)
    assert not GraphedOps.recorded
    results = generate(model, **extra)
    assert same(results, expected)
    assert GraphedOps.replays > 8
    assert "recorded step gave other" not in caplog.text


def test_steps_that_report_experts_are_not_repeated(generate):
    replays = []
    results = generate(
        MIXTRAL, routed_experts=True, between=lambda llm: replays.append(GraphedOps.replays)
    )
    assert replays == [0, 0, 0]
    assert all(result.routed_experts is not None for result in results)
    assert same(results, generate(MIXTRAL, **EAGER))


def test_on_a_cpu_a_mixture_runs_python_after_one_attempt(generate, monkeypatch):
    results = []

    def record(ops, run, _record=NativeOps.record):
        results.append(_record(ops, run))
        return results[-1]

    monkeypatch.setattr(NativeOps, "record", record)
    native = {"ops": "native_cpu", "attention": {"use": "native_cpu"}, "rounds": [PROMPTS[:2]]}
    expected = generate(QWEN_MOE, **native, **EAGER)
    assert not results
    assert same(generate(QWEN_MOE, **native), expected)
    assert results == [None]


def test_the_scripted_model_gives_the_same_tokens_bit_for_bit(scripted, expected, tmp_path):
    jobs = varied_jobs(25)
    reference = scripted_engine(scripted)
    expected = expected | alone(reference, jobs[len(expected) :])
    reference.close()
    folder = shutil.copytree(scripted, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Replayable"]}))
    enable = [{"use": f"{graphs.__name__}:ReplayableScript", "name": "Replayable"}]
    small = {"block_size": 8, "num_blocks": 40}
    engine = scripted_engine(
        folder,
        graphed_script({"plugins": {"enable": enable}, "kv_cache": small, "max_model_len": 128}),
    )
    assert run(engine, jobs, 2) == expected
    assert run(engine, jobs) == expected
    assert {1, 4, 8} <= set(GraphedOps.recorded)
    assert GraphedOps.replays > 30
    engine.close()


def test_inputs_are_read_when_a_step_is_repeated(generate, caplog):
    """A plugin that keeps the inputs of its recording is found out, and gives no wrong tokens."""
    expected = generate(**EAGER)
    with caplog.at_level(logging.WARNING, "hardpoint"):
        assert same(generate(ops="CopyingOps"), expected)
    assert GraphedOps.replays == 1
    assert caplog.text.count("a recorded step gave other hidden states than forward()") == 1


def test_a_sleep_forgets_what_was_recorded(generate):
    def sleep(llm):
        llm.sleep(1)
        assert not core_of(engine_of(llm)).work_when_idle()
        llm.wake_up()
        replays.append(GraphedOps.replays)
        ahead(llm)

    replays = []
    expected = generate(**EAGER)
    assert same(generate(between=sleep), expected)
    assert GraphedOps.recorded.count(8) == 3  # in the second round, and after it and the third
    assert replays[0] < replays[1] < replays[2]


@pytest.mark.parametrize(("error", "is_kept"), [(1e-4, True), (1e-2, False)])
def test_last_bits_may_differ(generate, caplog, monkeypatch, error, is_kept):
    monkeypatch.setattr(RoundingOps, "error", error)
    with caplog.at_level(logging.WARNING, "hardpoint"):
        generate(ops="RoundingOps")
    assert (GraphedOps.replays > 4) == is_kept
    lines = [r.message for r in caplog.records if "a recorded step gave other" in r.message]
    if is_kept:
        assert lines == []
    else:
        (line,) = lines
        assert "they differ by 0.01 of their length, expected at most 0.001" in line
        for name in ("models.llama:Llama", "RoundingOps", "PaddedAttention"):
            assert name in line


def test_a_plan_that_keeps_numbers_is_found(generate, caplog):
    """A backend with a plan that keeps the lengths of the recorded step."""
    with caplog.at_level(logging.WARNING, "hardpoint"):
        tokens = generate(attention=graphed("KeepsLengths"))
    assert "a recorded step gave other hidden states" in caplog.text
    assert same(tokens, generate(**EAGER))


NAN = float("nan")


@pytest.mark.parametrize(
    ("row", "expected", "is_small"),
    [
        ([NAN, 1.0], [NAN, 1.0], True),
        ([NAN, 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [NAN, 1.0], False),
        ([math.inf, 1.0], [math.inf, 1.0], True),
        ([1.0, 2.0], [math.inf, 2.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 1e-20], [0.0, 0.0], False),
        ([0.0, 100.0], [0.05, 100.0], True),
    ],
)
def test_differences_are_relative_to_the_row(row, expected, is_small):
    others = [1e6, 1.0]
    both = torch.tensor([others, row]), torch.tensor([others, expected])
    assert (float(relative_difference(*both)) <= 1e-3) == is_small


DRAFTS = {"speculation": {"use": ["ngram"], "num_draft_tokens": 3}}


@pytest.mark.parametrize("extra", [{}, DRAFTS], ids=["", "drafts"])
@pytest.mark.parametrize("ops", nightly_but(["GraphedOps", "RepeatingOps"], "RepeatingOps"))
def test_level_2_of_sleep_releases_all_at_once(generate, monkeypatch, ops, extra):
    """No cycle of references keeps weights and caches until Python's collector finds it."""
    references, of_graphs = [], []

    def noting(cls, name):
        function = getattr(cls, name)

        def note(*args):
            result = function(*args)
            references.extend(map(weakref.ref, result if isinstance(result, tuple) else (result,)))
            return result

        monkeypatch.setattr(cls, name, note)

    def sleep(llm):
        of_graphs.append(bool(GraphedOps.recorded))
        alive.append(sum(ref() is not None for ref in references))
        llm.sleep(2)
        alive.append(sum(ref() is not None for ref in references))

    alive = []
    noting(GraphedOps, "pack")
    noting(graphs.PaddedAttention, "allocate")
    gc.collect()
    gc.disable()
    try:
        generate(ops=ops, rounds=(PROMPTS[:1], PROMPTS[:1]), between=twice(sleep), **extra)
    finally:
        gc.enable()
    assert of_graphs == [True]
    assert alive[0] > 4
    assert alive[1] == 0


def twice(function):
    """Return a function that calls another one at its second call alone."""
    calls = itertools.count()
    return lambda llm: function(llm) if next(calls) else None


class TestWhen:
    def test_nothing_is_recorded_before_the_first_answer(self, generate):
        seen = []
        generate(between=lambda llm: seen.append(list(GraphedOps.recorded)))
        assert seen[0] == []
        assert seen[1]

    def test_a_size_is_recorded_once_several_steps_needed_it(self, generate):
        seen = []
        generate(tokens=5, between=lambda llm: seen.append(list(GraphedOps.recorded)))
        # Requests of the second round end after 5, 8, 11, 14 and 17 tokens: four steps need 8.
        assert seen[1] == [4, 2, 1]

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({}, "up to 8 sequences, recorded when idle or needed"),
            (EAGER, "off, since executor.enforce_eager is set"),
            ({"attention": {"use": "torch"}}, "off, since .* does not state replayable = True"),
            ({"ops": "Derived"}, r"off, since .*graphs:Derived.* does not state replayable = True"),
            ({"attention": graphed("Unpadded")}, "off, since .*Unpadded.* not state pads = True"),
            ({"ops": "torch"}, None),
            ({"ops": "native_cpu", "attention": {"use": "native_cpu"}}, None),
        ],
        ids=["all", "eager", "attention", "class-of-ops", "padding", "torch", "native_cpu"],
    )
    def test_one_line_states_whether_and_why_not(self, generate, caplog, settings, message):
        with caplog.at_level(logging.INFO, "hardpoint"):
            generate(between=ahead, rounds=(PROMPTS[:1],) * 2, tokens=2, **settings)
        starts = ("decode graphs: up to", "decode graphs: off")
        lines = [r.message for r in caplog.records if r.message.startswith(starts)]
        assert len(lines) == (message is not None)
        if message is not None:
            assert re.fullmatch(f"decode graphs: {message}", lines[0])
            assert bool(GraphedOps.recorded) == message.startswith("up to")

    def test_operations_that_record_nothing_are_named_once(self, generate, caplog):
        generate(ops="NoGraphs", rounds=(PROMPTS[:1], PROMPTS), tokens=6)
        assert caplog.text.count("cannot be recorded, nor will others be") == 1
        assert "the operations' record() gave None" in caplog.text

    @pytest.mark.parametrize("sizes", [(8, 4, 1), (0, 4), ("4",), (4, 4), (1, 300), None, (True,)])
    def test_sizes_are_checked(self, generate, monkeypatch, sizes):
        monkeypatch.setattr(GraphedOps, "record_sizes", lambda ops, most: sizes)
        with pytest.raises(PluginFaultError) as raised:
            generate(scheduler={"max_num_seqs": 256}, rounds=())
        assert "GraphedOps" in str(raised.value)
        assert "its record_sizes() gave" in str(raised.value)
        assert "expected numbers of sequences in 1..256, ascending" in str(raised.value)


def ahead(llm):
    """Record all that is missing, as an idle engine does; return how often it was asked."""
    calls = 1
    while core_of(engine_of(llm)).work_when_idle():
        calls += 1
    return calls


class TestAhead:
    def test_the_largest_size_comes_first(self, generate):
        generate(between=ahead, tokens=2)
        assert GraphedOps.recorded == [8, 4, 2, 1]

    def test_a_loop_is_told_when_no_more_are_left(self, generate):
        calls = []
        generate(between=lambda llm: calls.append(ahead(llm)), tokens=2)
        # The worker hears of the first answers with the plan that follows them.
        assert calls == [1, 4, 1] or calls == [4, 1, 1]

    def test_what_was_reserved_is_not_exceeded(self, generate, caplog):
        GraphedOps.graph_bytes = 20 << 20
        with caplog.at_level(logging.INFO, "hardpoint"):
            generate(between=ahead, tokens=8)
        assert GraphedOps.recorded == [8, 4]  # 4 times 8 MiB are reserved
        assert caplog.text.count("the memory reserved for them, 32 MiB, is used") == 1
        assert "sizes [4, 8] are recorded" in caplog.text
        assert ", decode graphs 32 MiB; this process may use" in caplog.text

    def test_a_recording_that_fails_is_told_once(self, generate, caplog):
        expected = generate(**EAGER)
        GraphedOps.fails = True
        with caplog.at_level(logging.WARNING, "hardpoint"):
            assert same(generate(between=ahead), expected)
        (line,) = [r.message for r in caplog.records if "cannot be recorded" in r.message]
        assert line == (
            "decode steps of 8 sequences cannot be recorded, nor will others be: RuntimeError: "
            "CUDA error: out of memory; with executor.enforce_eager = true, a restarted engine "
            "does not try"
        )


@pytest.mark.nightly
def test_steps_of_triton_are_repeated_where_it_is_interpreted(generate, monkeypatch):
    """The stand-in for CUDA graphs, and the attention kernels on padding."""
    pytest.importorskip("triton")
    replays = []
    call = RepeatedRun.__call__
    monkeypatch.setattr(RepeatedRun, "__call__", lambda run: replays.append(1) or call(run))
    triton = {"attention": {"use": "triton"}, "scheduler": {"max_num_seqs": 3}}
    model = LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 48}
    rounds = {"model": model, "ops": "triton", "tokens": 2, "rounds": [PROMPTS[3:4]] * 2}
    rounds["rounds"].append(PROMPTS[2:4])
    expected = generate(**rounds, **triton, **EAGER)
    assert not replays
    assert same(generate(**rounds, between=ahead, **triton), expected)
    assert replays

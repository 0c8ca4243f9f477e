"""Several ranks give the tokens of one process, whatever requests use and whichever end early."""

from __future__ import annotations

import contextlib
import signal

import msgspec
import pytest
from support.internals import engine_of
from support.parallel import (
    drive,
    mixed_jobs,
    open_llm,
    parallel_config,
    reference_of,
    same,
    write_random_model,
)

from hardpoint import HardpointError, SamplingParams

MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "num_hidden_layers": 4}),
    "windows": (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "num_hidden_layers": 5,  # of which three groups have two, one and two
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "phi3": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.5, "num_hidden_layers": 2}),
    "olmo2": ("Olmo2ForCausalLM", {"num_hidden_layers": 2}),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2},
    ),
}
SETTINGS = {"windows": {"kv_cache": {"num_blocks": 90}}}  # each has the tokens of two layers
RANKS = {"tensor 2": (2, 1), "pipeline 2": (1, 2), "2 x 2": (2, 2)}
SHORT = [("llama", "tensor 2")]
CASES = [
    pytest.param(model, ranks, marks=[] if (model, ranks) in SHORT else pytest.mark.nightly)
    for model in MODELS
    for ranks in RANKS
]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
BROKEN = msgspec.structs.replace(ENDLESS, plugin_args={"waves": {"fail_after": 5}})


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """By model: its folder and the results of one process."""
    known = {}

    def of(name):
        if name not in known:
            architecture, fields = MODELS[name]
            folder = tmp_path_factory.mktemp("random") / name
            write_random_model(folder, architecture, **fields)
            config = {"model": str(folder), "load": {"use": "dummy"}}
            known[name] = config, reference_of(config, mixed_jobs())
        return known[name]

    return of


def in_company(engine, jobs):
    """Run the jobs next to an aborted one and a raising processor; return results."""
    company = [("leaves", [1, 2, 3] * 9, ENDLESS), ("breaks", [4, 5] * 6, BROKEN)]
    jobs = [*jobs[:6], *company, *jobs[6:]]
    if engine.parts.client.in_process:
        calls = {20: lambda engine: engine.abort_requests("leaves")}
        return drive(engine, jobs, before_step=calls)
    # Any number of steps of its process is one step here, so they begin with all that is to run.
    engine.call_utility("pause", "keep")
    for job in jobs:
        engine.add_request(*job)
    engine.call_utility("resume")
    engine.abort_requests("leaves")
    return drive(engine, [])


def check(llm, expected):
    """Two rounds; the second finds the first's blocks in the prefix cache."""
    engine, jobs = engine_of(llm), mixed_jobs()
    for _ in range(2):
        before = llm.engines.scheduler_stats()
        got = in_company(engine, jobs)
        broken = got.pop("breaks")
        assert "waves" in broken.error
        assert "the wave broke" in broken.error
        assert len(broken.tokens[0]) == 5
        got.pop("leaves", None)
        assert got.keys() == expected.keys()
        same(engine, jobs, expected, got)
        stats = llm.engines.scheduler_stats()
        assert stats.num_preemptions > before.num_preemptions + 3
        assert stats.prefix_cache.hit_tokens > before.prefix_cache.hit_tokens + 100
        assert stats.num_running == stats.num_waiting == stats.kv_cache_usage == 0


@pytest.mark.parametrize(("model", "ranks"), CASES)
def test_random_weights(references, model, ranks):
    config, expected = references(model)
    tensor, pipeline = RANKS[ranks]
    with open_llm(parallel_config(tensor, pipeline, **config, **SETTINGS.get(model, {}))) as llm:
        check(llm, expected)


AHEAD = {
    use: {"executor": {"use": use}, "scheduler": {"asynchronous": True}}
    for use in ("uniproc", "multiproc")
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("use", "tensor", "in_process"),
    [
        ("uniproc", 1, True),
        pytest.param("uniproc", 1, False, marks=pytest.mark.nightly),
        pytest.param("multiproc", 1, True, marks=pytest.mark.nightly),
        pytest.param("multiproc", 2, True, marks=pytest.mark.nightly),
        pytest.param("multiproc", 1, False, marks=pytest.mark.nightly),
    ],
)
def test_planning_ahead(references, use, tensor, in_process):
    config, expected = references("llama")
    engine = {"engine": {"in_process": in_process}}
    with open_llm(parallel_config(tensor, **config, **AHEAD[use], **engine)) as llm:
        check(llm, expected)
        follower = {"tide"} if tensor == 1 else set()  # several ranks launch no step early
        waits = llm.engines.scheduler_stats().num_waits_for_results
        assert waits.keys() == {"structured_output"} | follower


@pytest.mark.parametrize("cache_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.nightly)])
def test_codes_of_keys_and_values(tmp_path, cache_dtype):
    """Each head has scales of its own: which rank has it changes no code."""
    model = write_random_model(tmp_path / "llama", "LlamaForCausalLM")
    settings = {"load": {"use": "dummy"}, "kv_cache": {"dtype": cache_dtype}}
    prompts = [[index * 7 % 250 for index in range(count)] for count in (60, 5, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    token_ids = []
    for tensor in (1, 2):
        with open_llm(parallel_config(tensor, model=str(model), **settings)) as llm:
            outputs = llm.generate(prompts, params)
        token_ids.append([output.outputs[0].token_ids for output in outputs])
    assert token_ids[0] == token_ids[1]


@pytest.mark.nightly
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (2, 2)])
def test_experts_that_are_spread_over_ranks(references, tensor, pipeline):
    config, expected = references("mixtral")
    settings = parallel_config(tensor, pipeline, **config, parallel={"expert": True})
    with open_llm(settings) as llm:
        check(llm, expected)


@pytest.mark.nightly
@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (1, 2)])
def test_real_weights(smollm2, tensor, pipeline):
    config, expected = smollm2
    with open_llm(parallel_config(tensor, pipeline, **config)) as llm:
        check(llm, expected)


@pytest.fixture(scope="module")
def smollm2():
    config = {"model": "smollm2"}
    return config, reference_of(config, mixed_jobs())


# What comes between steps, while batches are under way


def reset_cache(engine):
    engine.call_utility("reset_prefix_cache", True)


def pause_and_resume(engine):
    engine.call_utility("pause", "keep")
    engine.call_utility("resume")


def sleep_and_wake(level):
    def call(engine):
        engine.call_utility("sleep", level, "keep")
        assert engine.call_utility("is_sleeping")
        outputs = engine.step()  # of before; nothing runs
        engine.call_utility("wake_up", None)
        return outputs

    return call


def call_workers(engine):
    with pytest.raises(HardpointError, match="start_profile"):
        engine.call_utility("collective_rpc", "add_lora")
    assert engine.call_utility("collective_rpc", "plugin_meters")


BETWEEN = [reset_cache, pause_and_resume, sleep_and_wake(1), sleep_and_wake(2), call_workers]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "ranks",
    ["pipeline 2", *(pytest.param(n, marks=pytest.mark.nightly) for n in (*AHEAD, "tensor 2"))],
)
def test_control_calls_between_steps(references, ranks):
    """Caches are reset, the engine sleeps and wakes up, with tokens that are still under way."""
    config, expected = references("llama")
    config = config | AHEAD.get(ranks, {})
    calls = {10 + 7 * index: call for index, call in enumerate(BETWEEN * 2)}
    jobs = mixed_jobs()
    with open_llm(parallel_config(*RANKS.get(ranks, (1, 1)), **config)) as llm:
        engine = engine_of(llm)
        got = drive(engine, jobs, before_step=calls)
        same(engine, jobs, expected, got)
        assert llm.engines.scheduler_stats().num_preemptions > 10


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", ["tensor 2", "pipeline 2", *AHEAD])
def test_interrupts_leave_the_ranks_in_step(references, ranks):
    """A signal that interrupts a step ends its requests; later ones are right."""
    config, expected = references("llama")
    config = config | AHEAD.get(ranks, {})
    jobs = mixed_jobs()
    with open_llm(parallel_config(*RANKS.get(ranks, (1, 1)), **config)) as llm:
        engine = engine_of(llm)
        drive(engine, jobs)  # warm
        with interrupts() as after:
            for index in range(40):
                with contextlib.suppress(KeyboardInterrupt):
                    after(0.001 + 0.00173 * index)
                    drive(engine, jobs)
                after(0)
                while engine.has_unfinished_requests():
                    engine.step()
        same(engine, jobs, expected, drive(engine, jobs))


@contextlib.contextmanager
def interrupts():
    """Let a function arm a timer with a signal that raises KeyboardInterrupt in the executor.

    Elsewhere it is put off: what an interrupt leaves of other parts has tests of its own.
    """

    def interrupt(_number, frame):
        while frame is not None:
            if "/executors/" in frame.f_code.co_filename or frame.f_code.co_name == "result_of":
                raise KeyboardInterrupt
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 0.0002)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

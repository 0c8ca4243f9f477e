"""Foreign logits processors inside a running engine: they change their own rows, and no other."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import long
from driving import alone, run, summary

from hardpoint import RequestError, SamplingParams
from hardpoint.cli import main
from hardpoint.errors import PluginNotFoundError
from hardpoint.testing import scripted_engine

HERE = "foreign"
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def engine_with(scripted, target, options=None, name="thing", replies=None, **extra):
    options = {name: options} if options else {}
    if replies is not None:
        options["scripted_speculator"] = {"right": 0.7, "replies": replies}
    return scripted_engine(
        scripted,
        {
            "plugins": {"enable": ["vllm", {"use": f"{HERE}:{target}", "name": name}]},
            "plugin": options,
            "scheduler": {"max_num_seqs": 5},
            **extra,
        },
    )


def tokens(engine, prompt="say abc", **fields):
    params = SamplingParams(**{**GREEDY, **fields})
    return run(engine, [("r", prompt, params)])["r"][0][0][1]


def mixed_jobs(arguments_of, count=32, **fields):
    """Requests of many lengths, every third with arguments, so that they join, leave and move."""
    jobs = []
    for index in range(count):
        params = {
            "temperature": 1.0,
            "seed": index,
            "ignore_eos": True,
            "max_tokens": 1 + (index * 7) % 11,
        } | fields
        if index % 3 == 0:
            params["plugin_args"] = {"thing": arguments_of(index)}
        jobs.append((f"r{index}", [1 + index % 5] * (1 + index % 4), SamplingParams(**params)))
    return jobs


@pytest.fixture
def plain(scripted):
    """An engine without anything foreign."""
    engine = scripted_engine(scripted, {"scheduler": {"max_num_seqs": 5}})
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("target", "arguments_of", "options"),
    [
        ("OneToken", lambda i: {"extra_args": {"target_token": 60 + i}}, None),
        pytest.param("Sums", lambda i: {"extra_args": {"on": True}}, None, marks=long),
        ("SlotToken", lambda i: {"extra_args": {"target_token": 60 + i}}, None),
        pytest.param("Echo", lambda i: {}, None, marks=long),
        ("forcing", lambda i: {"extra_args": {"token": 60 + i}}, None),
        pytest.param("Stepping", lambda i: {"extra_args": {"token": 60 + i}}, None, marks=long),
        ("Everywhere", lambda i: {}, None),
    ],
)
def test_a_changing_batch_gives_what_each_request_gets_alone(
    scripted, plain, target, arguments_of, options
):
    jobs = mixed_jobs(arguments_of)
    engine = engine_with(scripted, target, options)
    together = run(engine, jobs, per_step=2)
    assert together == alone(engine, jobs)
    engine.close()
    without = run(plain, [(i, p, _bare(params)) for i, p, params in jobs], per_step=2)
    changed = {i for i, _, params in jobs if params.plugin_args}
    assert all(together[i] == without[i] for i, _, _ in jobs if i not in changed)
    assert sum(together[i] != without[i] for i in changed) > len(changed) / 2


GENERATIONS = [
    pytest.param("two_parameters", lambda i: {}, marks=long),
    pytest.param("Boost", lambda i: {}, marks=long),
    ("forcing", lambda i: {"extra_args": {"token": 60 + i}}),
    pytest.param("Stepping", lambda i: {"extra_args": {"token": 60 + i}}, marks=long),
    ("OneToken", lambda i: {"extra_args": {"target_token": 60 + i}}),
    pytest.param("Sums", lambda i: {"extra_args": {"on": True}}, marks=long),
    ("SlotToken", lambda i: {"extra_args": {"target_token": 60 + i}}),
    pytest.param("Echo", lambda i: {}, marks=long),
]
"""One or two of each of the three forms that vLLM has had."""


@pytest.mark.parametrize(("target", "arguments_of"), GENERATIONS)
def test_drafts_and_chunks_give_what_one_by_one_gives(scripted, target, arguments_of):
    jobs = [
        (name, prompt * 4, params)
        for name, prompt, params in mixed_jobs(arguments_of, max_tokens=9)
    ]
    engine = engine_with(scripted, target)
    expected = alone(engine, jobs)
    engine.close()
    replies = [[prompt, tokens] for name, prompt, _ in jobs for _, tokens, *_ in expected[name][0]]
    extra = {
        "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False},
        "scheduler": {"max_num_seqs": 5, "max_num_batched_tokens": 24},
    }
    engine = engine_with(scripted, target, **extra, replies=replies)
    assert run(engine, jobs, per_step=2) == expected
    stats = engine.call_utility("scheduler_stats")
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
    engine.close()


def _bare(params):
    fields = ("temperature", "seed", "ignore_eos", "max_tokens")
    return SamplingParams(**{field: getattr(params, field) for field in fields})


def test_a_vllm_style_min_p_equals_the_built_in_bit_for_bit(scripted):
    values = (0.0, 0.05, 0.4, 0.9)
    built_in, foreign = [], []
    for index in range(24):
        value = values[index % 4]
        fields = {"temperature": 0.8, "seed": index, "ignore_eos": True, "logprobs": -1}
        fields["max_tokens"] = 1 + (index * 7) % 13
        prompt = [1 + index % 5] * (1 + index % 4)
        extra = {"thing": {"extra_args": {"min_p": value}}} if value else {}
        built_in.append((f"r{index}", prompt, SamplingParams(**fields, min_p=value)))
        foreign.append((f"r{index}", prompt, SamplingParams(**fields, plugin_args=extra)))
    engine = engine_with(scripted, "MinP", sampler={"logprobs": "processed"})
    assert run(engine, foreign, per_step=3) == run(engine, built_in, per_step=3)
    assert run(engine, foreign) == alone(engine, built_in)
    with pytest.raises(RequestError, match="plugin_args.thing: min_p: expected a number from 0"):
        tokens(engine, plugin_args={"thing": {"extra_args": {"min_p": 3}}})
    engine.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extra_args": {"target_token": "x"}}, "plugin_args.thing: target_token value x is not"),
        ({"extra_args": {"target_token": 13}}, "plugin 'thing'"),
        ({"extra_args": 3}, "plugin_args.thing.extra_args: expected a table, got 3"),
        ({"target_token": 3}, "plugin_args.thing.target_token: unknown field"),
    ],
)
def test_a_request_that_the_class_does_not_like_is_refused(scripted, arguments, message):
    engine = engine_with(scripted, "OneToken")
    with pytest.raises(RequestError) as error:
        tokens(engine, plugin_args={"thing": arguments})
    assert message in str(error.value)
    assert tokens(engine, plugin_args={"thing": {"extra_args": {"target_token": 70}}}) == [
        70,
        71,
        72,
        73,
        74,
        75,
    ]
    engine.close()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("variadic", "_variadic(output_ids, *rest): 'rest' is variadic"),
        ("defaulted", "_defaulted(output_ids, logits, scale=1.0): 'scale' has a default"),
        ("keyword_only", "_keyword_only(output_ids, logits, *, scale): 'scale' is keyword-only"),
        ("keywords", "_keywords(output_ids, logits, **extra): 'extra' is variadic"),
        ("one", "(prompt_ids, output_ids, logits), got _one(logits)"),
        ("number", "(prompt_ids, output_ids, logits), or None, got int"),
        ("no_answer", "expected the logits back, also after an edit in place, got NoneType"),
        ("short", "expected logits of shape torch.Size([257]), got torch.Size([256])"),
        ("double", "expected logits of dtype torch.float32, got torch.float64"),
        ("raising", "RuntimeError: out of ideas"),
        ("missing", "KeyError: 'missing'"),
    ],
)
def test_an_unsuitable_callable_ends_its_request_alone(scripted, plain, argument, message):
    engine = engine_with(scripted, "odd")
    failing = SamplingParams(**GREEDY, plugin_args={"thing": {"extra_args": {"what": argument}}})
    jobs = [(f"r{i}", "x" * (i + 1), SamplingParams(**GREEDY)) for i in range(4)]
    wanted = run(plain, jobs)
    finals = {}
    for request_id, prompt, params in [*jobs[:2], ("failing", "say abc", failing), *jobs[2:]]:
        engine.add_request(request_id, prompt, params)
    while engine.has_unfinished_requests():
        finals.update((o.request_id, o) for o in engine.step() if o.finished)
    (failed,) = finals.pop("failing").outputs
    assert failed.finish_reason == "error"
    assert "plugin 'thing'" in failed.error
    assert message in failed.error
    assert {request_id: [summary(final)] for request_id, final in finals.items()} == wanted
    engine.close()


@pytest.mark.parametrize(
    ("read", "message"),
    [
        ("config.lora_config", "the engine configuration given to classes in vLLM's form has no"),
        ("states.draft_tokens", "has no 'draft_tokens'; it has device, max_num_reqs, vocab_size"),
        ("params.structured_outputs", "these sampling parameters have no 'structured_outputs'"),
    ],
)
def test_a_field_that_is_not_kept_ends_the_request_that_reads_it(scripted, plain, read, message):
    engine = engine_with(scripted, "SlotReads")
    failing = SamplingParams(**GREEDY, plugin_args={"thing": {"extra_args": {"read": read}}})
    fine = {"thing": {"extra_args": {"read": "params.temperature"}}}
    jobs = [("r0", "xy", SamplingParams(**GREEDY, plugin_args=fine))]
    for request_id, prompt, params in [("failing", "say abc", failing), *jobs]:
        engine.add_request(request_id, prompt, params)
    finals = {}
    while engine.has_unfinished_requests():
        finals.update((o.request_id, o) for o in engine.step() if o.finished)
    (failed,) = finals.pop("failing").outputs
    assert failed.finish_reason == "error"
    assert "plugin 'thing'" in failed.error
    assert message in failed.error
    assert [summary(finals["r0"])] == run(plain, _without(jobs))["r0"]
    engine.close()


def _without(jobs):
    return [(name, prompt, SamplingParams(**GREEDY)) for name, prompt, _ in jobs]


def test_a_factory_reads_what_vllms_parameters_have(scripted):
    engine = engine_with(scripted, "lengths")
    params = {"stop_token_ids": [50], "max_tokens": 4, "plugin_args": {"thing": {}}}
    assert tokens(engine, **params)
    engine.close()


MAIN = """
import torch
from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config

class Mine:
    def __init__(self, vllm_config, device, is_pin_memory):
        self.rows = set()

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is not None:
            self.rows -= set(batch_update.removed)
            self.rows |= {row for row, params, _, _ in batch_update.added if params.extra_args}

    def apply(self, logits):
        for row in self.rows:
            logits[row, 65] = 1e4
        return logits

extra = {"plugins": {"enable": ["vllm", "__main__:Mine"]}}
with LLM(config=scripted_config("FOLDER", extra)) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=3,
                            plugin_args={"mine": {"extra_args": {"on": True}}})
    print(llm.generate("x", params)[0].outputs[0].token_ids)
"""


def test_a_class_of_main_can_be_used_in_process(scripted, tmp_path):
    (tmp_path / "script.py").write_text(MAIN.replace("FOLDER", str(scripted)))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "[65, 65, 65]\n", done.stderr


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An installed distribution that offers `tokens` under vLLM's group."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "site"
    info = folder / "acme_vllm-2.0.dist-info"
    info.mkdir(parents=True)
    (folder / "acme_vllm.py").write_text(f"from {HERE} import OneToken\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_vllm\nVersion: 2.0\n")
    points = "[vllm.logits_processors]\ntokens = acme_vllm:OneToken\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("acme_vllm", None)


def listed_tokens(capsys, **plugins):
    settings = [p for key, value in plugins.items() for p in ("--set", f"plugins.{key}={value}")]
    assert main(["plugins", "list", *settings]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if "acme_vllm" in line]


@pytest.mark.usefixtures("site")
def test_vllms_entry_points_are_found_when_wanted_and_on_when_enabled(scripted, capsys):
    groups = '["vllm.logits_processors"]'
    assert listed_tokens(capsys) == []
    (line,) = listed_tokens(capsys, foreign_groups=groups)
    assert "not enabled" in line
    assert "acme_vllm" not in sys.modules
    (line,) = listed_tokens(capsys, foreign_groups=groups, enable='["vllm", "tokens"]')
    assert line.endswith("through adapter vLLM V1 class")
    plugins = {"enable": ["vllm", "tokens"]}
    with pytest.raises(PluginNotFoundError, match="no installed component is called 'tokens'"):
        scripted_engine(scripted, {"plugins": plugins})
    plugins["foreign_groups"] = ["vllm.logits_processors"]
    engine = scripted_engine(scripted, {"plugins": plugins})
    chosen = tokens(engine, plugin_args={"tokens": {"extra_args": {"target_token": 70}}})
    assert chosen == [70, 71, 72, 73, 74, 75]
    engine.close()


def test_the_listing_names_the_adapter(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["--set", f'plugins.enable=["vllm", "{HERE}:OneToken"]']
    assert main(["plugins", "list", *settings]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "one_token" in text]
    assert line.endswith("through adapter vLLM V1 class")
    assert main(["plugins", "show", "one_token", *settings]) == 0
    text = capsys.readouterr().out
    assert "adapter    vLLM V1 class" in text
    assert "The example of vLLM's documentation" in text
    assert "extra_args" in text
    assert "every_request" in text

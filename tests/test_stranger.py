"""A package from outside: built, installed and used as a stranger's would be.

Everything happens in subprocesses that see the installed package, so this process never does.
"""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.processes import ROOT, run
from support.strangers import RESOLVE

COMPOSE = """
import json, random, sys
from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config

folder = sys.argv[1]
rng = random.Random(1)
asked = [
    {"xtc": {"threshold": 0.01, "probability": 0.5}},
    {"dry": {"allowed_length": 1, "multiplier": 20.0}},
    {"xtc": {"threshold": 0.01, "probability": 1.0}, "dry": {"allowed_length": 1},
     "mirostat": {"tau": 1.0, "eta": 0.9}},
    {},
]
jobs = []
for index in range(16):
    prompt = [rng.randrange(97, 101) for _ in range(rng.randint(1, 30))]
    fields = dict(temperature=float(index % 3), seed=index, max_tokens=20, ignore_eos=True)
    fields["allowed_token_ids"] = list(range(97, 105))  # few, so that much repeats
    jobs.append((prompt, fields, asked[index % 4]))

def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]

def llm(**extra):
    extra["plugins"] = {"enable": ["dry", "xtc", "mirostat"]}
    return LLM(config=scripted_config(folder, extra))

with llm() as engine:
    plain = [tokens(engine.generate(p, SamplingParams(**fields)))[0] for p, fields, _ in jobs]
    prompts = [prompt for prompt, _, _ in jobs]
    params = [SamplingParams(**fields, plugin_args=asked) for _, fields, asked in jobs]
    alone = [tokens(engine.generate(*job))[0] for job in zip(prompts, params)]
together = []
small = {"max_model_len": 64, "kv_cache": {"block_size": 4, "memory_bytes": 4 * 8 * 40}}
for extra in ({}, {"scheduler": {"max_num_batched_tokens": 16}}, small):
    with llm(**extra) as engine:
        together.append(tokens(engine.generate(prompts, params)))
print(json.dumps({
    "changed": [one != other for one, other in zip(alone, plain)],
    "same": [run == alone for run in together],
}))
"""

GENERATE = """
import json, logging, sys
from hardpoint import LLM, SamplingParams
from hardpoint.plugins import HardpointError

logging.getLogger("acme_audit").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("acme_audit").setLevel(logging.INFO)
wanted = json.loads(sys.argv[1])
with LLM("smollm2", config=wanted["config"]) as llm:
    answers = []
    for fields in wanted["params"]:
        try:
            output = llm.generate([1, 2, 3, 4], SamplingParams(**fields))[0]
            answers.append(output.outputs[0].token_ids)
        except HardpointError as error:
            answers.append(str(error))
print(json.dumps(answers))
"""


@pytest.fixture
def resolve(acme, tmp_path):
    """Resolves a configuration's plugins where the package is installed."""

    def run_it(**config):
        arguments = (sys.executable, "-c", RESOLVE, json.dumps(config))
        return json.loads(run(*arguments, path=acme, cwd=tmp_path))

    return run_it


def offered(result):
    return [label.split(" ")[0] for label in result["not_enabled"]]


class TestThroughTheContract:
    def test_installed_is_not_enabled(self, resolve):
        result = resolve()
        assert result["not_enabled"] == [
            "hooks/acme_audit (acme-sampling 1.0.0, acme_sampling.audit:Audit)",
            "logits_processors/dry (acme-sampling 1.0.0, acme_sampling.dry:Dry)",
            "logits_processors/mirostat (acme-sampling 1.0.0, acme_sampling.mirostat:Mirostat)",
            "logits_processors/top_a (acme-sampling 1.0.0, acme_sampling:TopA)",
            "logits_processors/xtc (acme-sampling 1.0.0, acme_sampling.xtc:Xtc)",
            "samplers/arithmetic (acme-sampling 1.0.0, acme_sampling.arithmetic:Arithmetic)",
            "samplers/top_n_sigma (acme-sampling 1.0.0, acme_sampling.top_n_sigma:TopNSigma)",
        ]
        assert not any("acme" in " ".join(map(str, entry)) for entry in result["on"].values())
        assert result["imported"] == []
        assert result["hooks"] is False

    def test_enabled_by_name(self, resolve):
        result = resolve(plugins={"enable": ["top_a", "acme_audit"]})
        assert result["on"]["logits_processors/top_a"][:3] == [
            "acme_sampling:TopA",
            "acme-sampling",
            "1.0.0",
        ]
        assert "hooks/acme_audit" in result["on"]
        assert offered(result) == [
            "logits_processors/dry",
            "logits_processors/mirostat",
            "logits_processors/xtc",
            "samplers/arithmetic",
            "samplers/top_n_sigma",
        ]
        assert result["hooks"] is True

    def test_enabling_one_leaves_the_other(self, resolve):
        result = resolve(plugins={"enable": ["top_a", "dry", "xtc", "mirostat"]})
        assert offered(result) == [
            "hooks/acme_audit",
            "samplers/arithmetic",
            "samplers/top_n_sigma",
        ]
        assert "acme_sampling.dry" in result["imported"]
        assert "acme_sampling.audit" not in result["imported"]

    def test_runs_after_the_built_ins_that_it_names(self, resolve):
        order = resolve(plugins={"enable": ["xtc", "top_a", "dry"]})["order"]
        assert order[order.index("penalties") + 1] == "dry"
        assert order[-6:-3] == ["top_k", "top_p", "min_p"]
        assert sorted(order[-3:-1]) == ["top_a", "xtc"]
        assert order[-1] == "thinking_budget"

    def test_enabled_by_fqcn(self, resolve):
        result = resolve(plugins={"enable": ["acme_sampling:TopA"]})
        assert result["on"]["logits_processors/top_a"][:3] == [
            "acme_sampling:TopA",
            "acme-sampling",
            "1.0.0",
        ]

    def test_enabled_by_fqcn_under_another_name(self, resolve):
        use = {"use": "acme_sampling:TopA", "name": "squared"}
        result = resolve(plugins={"enable": [use]}, plugin={"squared": {"max_a": 0.5}})
        assert "logits_processors/top_a" not in result["on"]
        assert result["on"]["logits_processors/squared"][:4] == [
            "acme_sampling:TopA",
            "acme-sampling",
            "1.0.0",
            {"max_a": 0.5},
        ]

    def test_takes_the_place_of_a_built_in(self, resolve):
        result = resolve(plugins={"replace": {"min_p": "acme_sampling:TopA"}})
        assert result["on"]["logits_processors/min_p"][0] == "acme_sampling:TopA"
        assert result["order"].count("min_p") == 1

    def test_an_option_out_of_range_is_refused_with_its_path(self, resolve):
        result = resolve(plugins={"enable": ["top_a"]}, plugin={"top_a": {"max_a": 2}})
        assert result["error"] == "ConfigError"
        assert "plugin.top_a.max_a: expected a number <= 1, got 2" in result["message"]

    def test_an_unknown_option_is_refused_with_a_suggestion(self, resolve):
        result = resolve(plugins={"enable": ["top_a"]}, plugin={"top_a": {"maxa": 0.5}})
        assert result["error"] == "ConfigError"
        assert "plugin.top_a.maxa: unknown field" in result["message"]
        assert "did you mean 'max_a'?" in result["message"]

    def test_options_of_a_plugin_that_is_not_enabled_are_refused(self, resolve):
        result = resolve(plugin={"top_a": {"max_a": 0.5}})
        assert result["error"] == "ConfigError"
        assert "plugin.top_a: no plugin 'top_a' is enabled" in result["message"]

    def test_a_misspelt_name_is_refused_with_a_suggestion(self, resolve):
        result = resolve(plugins={"enable": ["topa"]})
        assert result["error"] == "PluginNotFoundError"
        assert "plugins.enable[0]: no installed component is called 'topa'" in result["message"]
        assert "(did you mean 'top_a'?)" in result["message"]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"a": 0}, "plugin_args.top_a.a: expected a number > 0, got 0"),
            ({"a": 1.5}, "plugin_args.top_a.a: expected a number <= 1, got 1.5"),
            ({"a": "x"}, "plugin_args.top_a.a: expected a number"),
            ({}, "plugin_args.top_a.a: missing, and it has no default"),
            ({"a": 0.5, "b": 1}, "plugin_args.top_a.b: unknown field"),
        ],
    )
    def test_arguments_are_checked(self, acme, tmp_path, given, message):
        code = """
import json, sys
from acme_sampling import TopA
from hardpoint.plugins import RequestError
from hardpoint.typed import convert
try:
    convert(json.loads(sys.argv[1]), TopA.Arguments, path="plugin_args.top_a", error=RequestError)
except RequestError as error:
    print(error)
"""
        arguments = (sys.executable, "-c", code, json.dumps(given))
        assert run(*arguments, path=acme, cwd=tmp_path).startswith(message)

    @pytest.mark.nightly
    def test_its_own_tests_pass(self, acme, tmp_path):
        shutil.copytree(ROOT / "examples" / "acme_sampling" / "tests", tmp_path / "tests")
        pytest_run = (sys.executable, "-m", "pytest", "-q", "tests")
        assert "passed" in run(*pytest_run, path=acme, cwd=tmp_path, examples=0.1)


@pytest.mark.nightly
def test_dry_and_xtc_give_the_same_alone_batched_in_chunks_and_preempted(acme, scripted, tmp_path):
    arguments = (sys.executable, "-c", COMPOSE, str(scripted))
    result = json.loads(run(*arguments, path=acme, cwd=tmp_path))
    assert result["same"] == [True] * 3
    assert result["changed"] == [True, True, True, False] * 4


class TestThroughTheEngine:
    """With the real model: the plugin changes tokens, and only for requests that ask."""

    @pytest.fixture
    def generate(self, acme, tmp_path):
        def run_it(params, logged=None, **config):
            wanted = json.dumps({"config": config, "params": params})
            arguments = (sys.executable, "-c", GENERATE, wanted)
            *log, answers = run(*arguments, path=acme, cwd=tmp_path).splitlines()
            assert logged is None or logged in log
            return json.loads(answers)

        return run_it

    def test_the_hook_sees_every_request_and_the_end(self, generate):
        params = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
        generate(
            [params, params],
            logged="finished: length 2",
            plugins={"enable": ["acme_audit"]},
        )

    def test_changes_the_tokens_of_those_who_ask(self, generate):
        random = {"temperature": 1.5, "seed": 7, "max_tokens": 12, "ignore_eos": True}
        plain, first, narrow, second, greedy = generate(
            [
                random,
                random | {"plugin_args": {"top_a": {"a": 1e-9}}},
                random | {"plugin_args": {"top_a": {"a": 1.0}}},
                random,
                {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True},
            ],
            plugins={"enable": ["top_a"]},
        )
        assert plain == first == second
        assert narrow != plain
        assert greedy != plain

    def test_wrong_arguments_and_too_large_ones_are_refused(self, generate):
        wrong, too_large, unknown = generate(
            [
                {"plugin_args": {"top_a": {"a": "x"}}},
                {"plugin_args": {"top_a": {"a": 0.9}}},
                {"plugin_args": {"topa": {"a": 0.9}}},
            ],
            plugins={"enable": ["top_a"]},
            plugin={"top_a": {"max_a": 0.5}},
        )
        assert "plugin_args.top_a.a: expected a number" in wrong
        assert "plugin_args.top_a: a: expected at most 0.5, got 0.9" in too_large
        assert "plugin_args.topa: no enabled plugin of that name" in unknown
        assert "(did you mean 'top_a'?)" in unknown

    def test_errors_of_arguments_name_how_to_enable_their_component(self, generate):
        (message,) = generate([{"plugin_args": {"top_a": {"a": 0.5}}}])
        assert 'acme-sampling 1.0.0 offers it: add "top_a" to plugins.enable' in message

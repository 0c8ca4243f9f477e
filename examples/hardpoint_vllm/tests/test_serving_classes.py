"""vLLM's IO processors and stat loggers as plugins of an engine."""

import asyncio
import importlib
import importlib.util
import sys

import pytest
from hardpoint_vllm.stand_ins import stand_ins

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams
from hardpoint.errors import PluginContractError
from hardpoint.plugins.params import PoolingParams
from hardpoint.testing import scripted_config, serve
from hardpoint.vllm import LLM as VLLM
from hardpoint.vllm import AsyncEngineArgs
from hardpoint.vllm import AsyncLLM as AsyncVLLM
from hardpoint.vllm import SamplingParams as VLLMSamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed"
)

HERE = "vllm_serving"
ROWS = [[20, 30], [40, 50, 60]]


def config_with(folder, *classes, **options):
    """Return a configuration of the scripted model that enables classes of vLLM."""
    enable = ["vllm", *(f"{HERE}:{name}" for name in classes)]
    return scripted_config(folder, {"plugins": {"enable": enable}, "plugin": options})


def expected(llm, rows, **params):
    """Return the sums of the model's vectors of rows."""
    outputs = llm.encode(rows, PoolingParams(pooler="mean", **params))
    return [float(output.outputs.sum()) for output in outputs]


def test_an_io_processor_makes_prompts_and_answers(scripted):
    with LLM(config=config_with(scripted, "Numbers", numbers={"pooler": "mean"})) as llm:
        output = llm.plugins.process({"rows": ROWS})
        assert output.sums == pytest.approx(expected(llm, ROWS), abs=1e-5)
        assert output.request_id.startswith("io-")


def test_coroutine_methods_replace_plain_ones(scripted):
    options = {"async_numbers": {"pooler": "mean"}}

    async def process():
        async with AsyncLLM(config=config_with(scripted, "AsyncNumbers", **options)) as llm:
            return await llm.plugins.process({"rows": ROWS})

    output = asyncio.run(process())
    with LLM(config=config_with(scripted)) as llm:
        texts = [llm.tokenizer.decode(row, skip_special_tokens=False) for row in ROWS]
        sums = expected(llm, texts, normalize=False)
    assert output.sums == pytest.approx(sums, abs=1e-5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rows": [list(range(9000))]}, "data: ValueError: rows: too long"),
        ({"row": []}, "data: KeyError: 'rows'"),
        ([1], "data: ValueError: Unable to parse request"),
    ],
)
def test_errors_of_an_input_are_the_clients(scripted, data, message):
    with (
        LLM(config=config_with(scripted, "Numbers")) as llm,
        pytest.raises(RequestError, match=message),
    ):
        llm.plugins.process(data)


def test_an_answer_over_http_is_the_data_of_its_response(scripted):
    extra = {
        "plugins": {"enable": ["vllm", f"{HERE}:Numbers"]},
        "plugin": {"numbers": {"as_request": True, "pooler": "mean"}},
    }
    with serve(extra) as server:
        answer = server.ask("/pooling", {"data": {"rows": ROWS}, "io_processor": "numbers"})
        assert len(answer.json()["data"]) == 2


def test_a_stat_logger_records_and_logs(scripted):
    config = config_with(scripted)
    config["stats"] = {"sinks": [f"{HERE}:LatencyLogger"]}
    with LLM(config=config) as llm:
        outputs = llm.generate(["One", "Two"], SamplingParams(max_tokens=5, ignore_eos=True))
    (logger,) = sys.modules[HERE].LatencyLogger.instances
    assert logger.initialized
    assert (logger.engine_index, logger.model) == (0, str(scripted))
    assert logger.tokens == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert [(str(reason), count) for reason, count in logger.finished] == [("length", 5)] * 2
    assert logger.busiest == 2
    assert logger.queries == sum(len(output.prompt_token_ids) for output in outputs)
    assert logger.logs > 0


def test_programs_pass_io_processors_and_stat_loggers(scripted):
    with stand_ins():
        classes = importlib.import_module(HERE)
    arguments = {
        "model": str(scripted),
        "io_processor_plugin": f"{HERE}:Numbers",
        "hardpoint_config": scripted_config(scripted),
    }

    async def outputs():
        args = AsyncEngineArgs(**arguments)
        engine = AsyncVLLM.from_engine_args(args, stat_loggers=[classes.LatencyLogger])
        [output] = [item async for item in engine.encode({"data": {"rows": ROWS}}, None, "r")]
        params = VLLMSamplingParams(max_tokens=3, ignore_eos=True)
        async for _ in engine.generate("One", params, "s"):
            pass
        engine.shutdown()
        return output

    output = asyncio.run(outputs())
    (logger,) = classes.LatencyLogger.instances
    assert [count for _, count in logger.finished if count] == [3]
    with VLLM(**arguments) as llm:
        (same,) = llm.encode({"data": {"rows": ROWS}}, pooling_task="plugin")
    assert output.outputs.sums == pytest.approx(same.outputs.sums, abs=1e-5)
    with pytest.raises(ValueError, match=r"stat_loggers\[0\]: expected a class derived from"):
        AsyncVLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[print])


def test_a_statistic_that_is_not_counted_is_named(scripted):
    config = config_with(scripted)
    config["stats"] = {"sinks": [f"{HERE}:ReadsCorruption"]}
    with LLM(config=config) as llm:
        assert llm.generate("One", SamplingParams(max_tokens=2))[0].finished
        fallback = llm.plugins.health().fallbacks["reads_corruption"]
    assert "the IterationStats given to classes of vLLM has no 'num_corrupted_reqs'" in (
        fallback.message
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [("WithoutParsing", r"it lacks parse_data\(data\)"), ("Unfinished", "it lacks record")],
)
def test_a_class_that_lacks_a_method_stops_the_start(scripted, name, message):
    with pytest.raises(PluginContractError, match=message):
        LLM(config=config_with(scripted, name))

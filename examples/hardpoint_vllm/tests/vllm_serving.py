"""IO processors and stat loggers that import vLLM, as its documentation writes them."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.entrypoints.openai.protocol import IOProcessorRequest, IOProcessorResponse
from vllm.inputs.data import PromptType
from vllm.logger import init_logger
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import (
    IOProcessor,
    IOProcessorInput,
    IOProcessorOutput,
)
from vllm.pooling_params import PoolingParams
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

logger = init_logger(__name__)


@dataclasses.dataclass
class Sums:
    request_id: str
    sums: list[float]


class Numbers(IOProcessor[IOProcessorInput, IOProcessorOutput]):
    """Rows of numbers; the answer has the sum of each row's vector."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        assert Path(vllm_config.model_config.model).exists()
        self.longest = vllm_config.model_config.max_model_len
        self.rows: dict[str, int] = {}

    def parse_request(self, request: Any) -> IOProcessorInput:
        if type(request) is dict:
            return self.rows_of(request)
        if isinstance(request, IOProcessorRequest):
            return self.rows_of(request.data)
        raise ValueError("Unable to parse request")

    def rows_of(self, data):
        rows = data["rows"]
        if any(len(row) > self.longest for row in rows):
            raise ValueError("rows: too long")
        return rows

    def output_to_response(self, plugin_output: IOProcessorOutput) -> IOProcessorResponse:
        return IOProcessorResponse(request_id=plugin_output.request_id, data=plugin_output.sums)

    def pre_process(
        self, prompt: IOProcessorInput, request_id: str | None = None, **kwargs
    ) -> PromptType | Sequence[PromptType]:
        self.rows[request_id] = len(prompt)
        return [{"prompt_token_ids": [int(number) for number in row]} for row in prompt]

    def post_process(
        self,
        model_output: Sequence[PoolingRequestOutput],
        request_id: str | None = None,
        **kwargs,
    ) -> IOProcessorOutput:
        assert self.rows.pop(request_id) == len(model_output)
        return Sums(request_id, [float(output.outputs.data.sum()) for output in model_output])


class AsyncNumbers(Numbers):
    """The coroutine forms, with the newer names and the renderer."""

    def __init__(self, vllm_config: VllmConfig, renderer):
        super().__init__(vllm_config)
        self.tokenizer = renderer.get_tokenizer()

    def parse_data(self, data: object):
        return self.rows_of(data)

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        return params or PoolingParams(task="plugin", use_activation=False)

    async def pre_process_async(self, prompt, request_id=None, **kwargs):
        self.rows[request_id] = len(prompt)
        return [self.tokenizer.decode([int(number) for number in row]) for row in prompt]

    async def post_process_async(self, model_output, request_id=None, **kwargs):
        outputs = {index: output async for index, output in model_output}
        return self.post_process([outputs[index] for index in sorted(outputs)], request_id)


class WithoutParsing(IOProcessor):
    """Lacks parse_data."""

    def pre_process(self, prompt, request_id=None, **kwargs):
        return prompt

    def post_process(self, model_output, request_id=None, **kwargs):
        return None


class LatencyLogger(StatLoggerBase):
    """Counts requests and tokens."""

    instances: deque[Any] = deque(maxlen=1)

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0):
        self.model, self.engine_index = vllm_config.model_config.model, engine_index
        self.finished: deque[Any] = deque(maxlen=8)
        self.queries, self.tokens, self.logs, self.busiest = 0, 0, 0, 0
        self.initialized = False
        self.instances.append(self)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ):
        assert engine_idx == self.engine_index
        if scheduler_stats is not None:
            self.queries += scheduler_stats.prefix_cache_stats.queries
            self.busiest = max(self.busiest, scheduler_stats.num_running_reqs)
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens
            for request in iteration_stats.finished_requests:
                assert request.e2e_latency >= 0
                self.finished.append((request.finish_reason, request.num_generation_tokens))

    def log(self):
        self.logs += 1
        logger.info("%d of %d", self.tokens, len(self.finished))

    def log_engine_initialized(self):
        self.initialized = True


class ReadsCorruption(LatencyLogger):
    """Reads a field that Hardpoint does not count."""

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        assert FinishReason.LENGTH == 1
        self.tokens += iteration_stats.num_corrupted_reqs


class Unfinished(StatLoggerBase):
    """Lacks record."""

    def __init__(self, vllm_config, engine_index=0):
        pass

    def log_engine_initialized(self):
        pass

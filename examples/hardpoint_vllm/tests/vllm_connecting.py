"""KV connectors that import vLLM, as its documentation writes them."""

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)


@dataclass
class Job:
    """Slots of whole blocks, and the folder of their tokens."""

    request_id: str
    folder: str
    slots: torch.Tensor
    is_store: bool


@dataclass
class Jobs(KVConnectorMetadata):
    jobs: list[Job] = field(default_factory=list)


class FolderConnector(KVConnectorBase_V1):
    """Keeps the prompts' layers in a folder per prompt, and loads them in the step."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.size = vllm_config.cache_config.block_size
        self.path = Path(self._kv_transfer_config.get_from_extra_config("path", "/nowhere"))
        self.to_load: dict[str, Request] = {}
        self.errors: set[int] = set()
        assert self.role is role

    def folder(self, token_ids: list[int]) -> Path:
        length = (len(token_ids) - 1) // self.size * self.size
        digest = hashlib.sha256(np.array(token_ids[:length]).tobytes())
        return self.path / digest.hexdigest()

    def job(self, request_id, token_ids, block_ids, is_store) -> Job:
        count = (len(token_ids) - 1) // self.size
        blocks = torch.tensor(block_ids[:count], dtype=torch.long)
        slots = (blocks[:, None] * self.size + torch.arange(self.size)).flatten()
        return Job(request_id, str(self.folder(token_ids)), slots, is_store)

    # Worker

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        for job in self._get_connector_metadata().jobs:
            if job.is_store:
                continue
            assert set(forward_context.attn_metadata) == set(forward_context.no_compile_layers)
            for name, layer in forward_context.no_compile_layers.items():
                self.inject(layer.kv_cache, job, name)

    def inject(self, layer: torch.Tensor, job: Job, name: str) -> None:
        blocks, offsets = job.slots // self.size, job.slots % self.size
        try:
            data = np.load(Path(job.folder) / f"{name}.npy")
        except OSError:
            self.errors.update(blocks.tolist())
            return
        layer[blocks, :, offsets] = torch.from_numpy(data)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        for job in self._get_connector_metadata().jobs:
            if job.is_store:
                folder = Path(job.folder)
                folder.mkdir(exist_ok=True)
                data = kv_layer[job.slots // self.size, :, job.slots % self.size]
                np.save(folder / f"{layer_name}.npy", data.numpy())

    def wait_for_save(self):
        return

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self.errors = self.errors, set()
        return errors

    # Scheduler

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = request.prompt_token_ids
        if not self.folder(tokens).exists():
            return 0, False
        return (len(tokens) - 1) // self.size * self.size - num_computed_tokens, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ):
        assert len(blocks.get_block_ids()) == 1
        if num_external_tokens > 0:
            self.to_load[request.request_id] = request

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = Jobs()
        for new in scheduler_output.scheduled_new_reqs:
            is_store = new.req_id not in self.to_load
            tokens = new.prompt_token_ids
            if is_store and len(tokens) > scheduler_output.num_scheduled_tokens[new.req_id]:
                continue  # the prompt is computed in several steps
            if len(tokens) > self.size and not (is_store and self.folder(tokens).exists()):
                meta.jobs.append(self.job(new.req_id, tokens, new.block_ids[0], is_store))
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if request_id in cached.resumed_req_ids and request_id in self.to_load:
                request = self.to_load[request_id]
                blocks = cached.new_block_ids[index][0]
                tokens = request.prompt_token_ids
                meta.jobs.append(self.job(request_id, tokens, blocks, False))
        self.to_load.clear()
        return meta


@dataclass
class Done(KVConnectorWorkerMetadata):
    loaded: tuple[str, ...]

    def aggregate(self, other):
        return Done(self.loaded + other.loaded)


class BetweenSteps(FolderConnector):
    """Loads in a thread between steps, and reports the loaded blocks."""

    loaded: list[Any] = []
    outputs: list[Any] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]):
        self.layers = kv_caches
        self.threads: dict[str, threading.Thread] = {}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens > 0:
            self.to_load[request.request_id] = (request, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output):
        loads = [
            self.job(request_id, request.prompt_token_ids, blocks, False)
            for request_id, (request, blocks) in self.to_load.items()
        ]
        self.to_load.clear()
        meta = super().build_connector_meta(scheduler_output)
        meta.jobs += loads
        return meta

    def start_load_kv(self, forward_context, **kwargs):
        for job in self._get_connector_metadata().jobs:
            if not job.is_store:
                thread = threading.Thread(target=self.load, args=(job,))
                self.threads[job.request_id] = thread
                thread.start()

    def load(self, job):
        for name, layer in self.layers.items():
            self.inject(layer, job, name)

    def get_finished(self, finished_req_ids):
        ended = {name for name, thread in self.threads.items() if not thread.is_alive()}
        for name in ended:
            del self.threads[name]
        self.ended = ended
        return None, ended

    def build_connector_worker_meta(self):
        return Done(tuple(self.ended)) if self.ended else None

    def update_connector_output(self, connector_output):
        self.outputs.append(connector_output)

    def shutdown(self):
        for thread in getattr(self, "threads", {}).values():
            thread.join()


class PartialBlocks(FolderConnector):
    """Matches all but four tokens, which may end within a block."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return max(len(request.prompt_token_ids) - 4 - num_computed_tokens, 0), False


class ReadsStatus(FolderConnector):
    """Reads a field that Hardpoint's requests do not have."""

    def request_finished(self, request, block_ids):
        return request.status == "FINISHED_LENGTH_CAPPED", None


class NeedsPool(FolderConnector):
    """Needs vLLM's block pool."""

    def bind_gpu_block_pool(self, gpu_block_pool):
        self.pool = gpu_block_pool


class NeedsLayout(FolderConnector):
    """Needs a layout."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return "HND"


class SendsLock(FolderConnector):
    """Sends an object that is no data."""

    def build_connector_meta(self, scheduler_output):
        meta = super().build_connector_meta(scheduler_output)
        meta.lock = threading.Lock()
        return meta


class Unfinished(KVConnectorBase_V1):
    """Lacks the methods."""

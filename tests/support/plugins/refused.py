"""Components that do not go together with a KV connector, planning ahead, or images."""

from __future__ import annotations

from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.plugins import EngineHalf, KVSpec, StepPart
from hardpoint.testing import HistoryAttention, ScriptedModel
from support.samples import Sample


class OneAtATime(UniprocExecutor):
    contract = 2
    max_concurrent_batches = 1


class NoLayout(HistoryAttention):
    contract = 1
    kv_layout = ""


class SeesNothingAhead(TorchAttention):
    contract = 1
    sees_ahead = False


class SilentLoader(Sample, DummyLoader, contract=1):
    def content_hash(self, hash_file):
        return None


class SlidingModel(Sample, ScriptedModel, contract=1):
    def kv_specs(self):
        return [KVSpec(num_heads=1, num_kv_heads=1, head_size=2, scale=1.0, window=8)]


class LoadsBlocks(Sample, StepPart, contract=1):
    def engine_half(self, context):
        class Half(EngineHalf):
            def get_num_new_matched_tokens(self, request, num_computed_tokens):
                return 0, False

        return Half()

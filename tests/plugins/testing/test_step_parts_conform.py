"""The built-in step parts, and plain good ones, pass the public conformance kit."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support import square_images
from support.adapters import write_tensors
from support.broken.poolers import Largest, Newest
from support.broken.speculators import LastPair
from support.broken.step_parts import Drafts, Good, GoodWorker
from support.broken.taps import Norms, Scaled
from support.kit_suites import assert_tests_builtins
from support.plugins.main_model import Scores
from support.searching import kit_examples

from hardpoint.builtin_plugins.step_parts.adapters import Adapters
from hardpoint.builtin_plugins.step_parts.adapters.identity import content_hash, read_files
from hardpoint.builtin_plugins.step_parts.encoders import Encoders
from hardpoint.builtin_plugins.step_parts.kv_canary import KVCanary
from hardpoint.builtin_plugins.step_parts.kv_transfer import KVTransfer
from hardpoint.builtin_plugins.step_parts.parsing import OutputParsing
from hardpoint.builtin_plugins.step_parts.pooling import Pooling
from hardpoint.builtin_plugins.step_parts.prompt_embeddings import PromptEmbeddings
from hardpoint.builtin_plugins.step_parts.recording import RecordedSteps
from hardpoint.builtin_plugins.step_parts.retention.part import PrefixRetention
from hardpoint.builtin_plugins.step_parts.speculation import Speculation
from hardpoint.builtin_plugins.step_parts.statistics import RequestStatistics
from hardpoint.builtin_plugins.step_parts.structured import StructuredOutput
from hardpoint.builtin_plugins.step_parts.taps import ActivationTaps
from hardpoint.builtin_plugins.step_parts.timings import Timings
from hardpoint.builtin_plugins.step_parts.trace import Tracing
from hardpoint.builtin_plugins.step_parts.weight_updates import WeightUpdates
from hardpoint.plugins import (
    EngineCoreRequest,
    GrammarBackend,
    LoRARequest,
    ModelConfig,
    ReasoningMarkers,
    Request,
    SamplingParams,
    requests,
)
from hardpoint.plugins.model import LinearMatrix
from hardpoint.plugins.model.ops import Ops
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import MultiModalFeature
from hardpoint.plugins.requests.media import Image
from hardpoint.plugins.requests.media_format import MediaFormat
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import ScriptedDrafts, ScriptedModel, StepPartSuite
from hardpoint.testing.running.step_parts.compared import block_hashes

pytest_plugins = ["hardpoint.testing"]


PROMPTS = st.lists(st.integers(1, 20), min_size=1, max_size=4)


def request(prompt, params=None, **fields):
    """Return a request that ends at token 256."""
    return EngineCoreRequest(
        request_id="",
        prompt_token_ids=prompt,
        params=params or SamplingParams(),
        eos_token_ids=[256],
        **fields,
    )


def including(name, is_included):
    """Return parameters of a request for an output of a part."""
    return SamplingParams(include=[name] if is_included else [])


class Rising:
    """Letters, none of them before the last one; may end after two."""

    def __init__(self, first, tokens=()):
        self.first, self.tokens = first, list(tokens)

    def fill_bitmask(self, row):
        for token in range(self.tokens[-1] if self.tokens else self.first, 123):
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return len(self.tokens) >= 2

    def advance(self, token_id):
        allowed = (self.tokens[-1] if self.tokens else self.first) <= token_id < 123
        if allowed:
            self.tokens.append(token_id)
        return allowed

    def rollback(self, count):
        del self.tokens[-count:]

    def fork(self):
        return Rising(self.first, self.tokens)


class RisingLetters(GrammarBackend):
    contract = 1
    formats = ("regex",)

    def compile(self, structured):
        if structured.regex == "wrong":
            raise ValueError("not this one")
        return Rising(ord(structured.regex))


class TestGood(StepPartSuite):
    examples = kit_examples()
    part = Good
    calls = [("live", {})]


class TestGoodWorker(StepPartSuite):
    examples = kit_examples()
    part = GoodWorker


class TestDrafts(StepPartSuite):
    examples = kit_examples()
    part = Drafts


class TestScriptedDrafts(StepPartSuite):
    examples = kit_examples()
    part = ScriptedDrafts
    options = {"replies": [[[1, 2], [5, 6, 7, 8]]]}


class TestReportedDrafts(TestScriptedDrafts):
    options = {"made_in": "worker"}


class TestStructuredOutput(StepPartSuite):
    examples = kit_examples()
    part = StructuredOutput
    components = {"grammars": {"llguidance": RisingLetters}}

    def requests(self):
        markers = ReasoningMarkers(start=((7, 8),), end=(9,))
        return st.builds(
            lambda regex, prompt, markers: request(
                prompt,
                params=SamplingParams(structured=regex and StructuredOutputs(regex=regex)),
                reasoning_markers=markers,
            ),
            st.sampled_from(["a", "h", "w", "wrong", None]),
            PROMPTS,
            st.sampled_from([None, markers]),
        )


class TestRecordedSteps(StepPartSuite):
    examples = kit_examples()
    part = RecordedSteps


class TestSpeculation(StepPartSuite):
    examples = kit_examples()
    part = Speculation
    components = {"speculators": {"last_pair": LastPair}}


class TestActivationTaps(StepPartSuite):
    examples = kit_examples()
    part = ActivationTaps
    components = {"activation_taps": {"norms": Norms, "scaled": Scaled}}

    def requests(self):
        drawn = st.sampled_from(
            [
                {},
                {"activation_taps/norms": {}},
                {"activation_taps/norms": {}, "activation_taps/scaled": {"factor": 0.5}},
            ]
        )
        return st.builds(
            lambda prompt, arguments: request(
                prompt, including("activation_taps", arguments), plugin_args=arguments
            ),
            PROMPTS,
            drawn,
        )


class TestTracing(StepPartSuite):
    examples = kit_examples()
    part = Tracing

    def requests(self):
        return st.builds(
            lambda prompt, is_traced: request(prompt, including("trace", is_traced)),
            PROMPTS,
            st.booleans(),
        )


class TestTimings(StepPartSuite):
    examples = kit_examples()
    part = Timings

    def requests(self):
        return st.builds(
            lambda prompt, is_timed: request(prompt, including("timings", is_timed)),
            PROMPTS,
            st.booleans(),
        )


class TestScores(StepPartSuite):
    """Its worker half opens a further model."""

    examples = kit_examples()
    part = Scores
    calls = (("rows", {"a": [1, 2, 3]}), ("num_layers", {}))


class TestWeightUpdates(StepPartSuite):
    examples = kit_examples()
    part = WeightUpdates
    config = {"load": {"version": "7"}}

    def requests(self):
        before = st.lists(st.integers(1, 20), max_size=4)
        resumed = st.none() | st.builds(requests.ResumedOutputs, before)
        return st.builds(lambda prompt, state: request(prompt, resumed=state), PROMPTS, resumed)


class TestPooling(StepPartSuite):
    examples = kit_examples()
    part = Pooling
    components = {"poolers": {"largest": Largest, "newest": Newest}}
    prompts = [{"text": "ab", "text_pair": "c"}]
    prompt_pooling = PoolingParams(task="score", pooler="largest")

    def requests(self):
        return st.builds(
            lambda prompt, pooling: request(prompt, pooling_params=pooling),
            PROMPTS,
            st.none()
            | st.builds(
                PoolingParams,
                pooler=st.sampled_from(["largest", "newest", "other"]),
                normalize=st.none() | st.booleans(),
            ),
        )


ROWS = np.arange(3 * 16, dtype=np.float32).reshape(3, 16)


class TestOutputParsing(StepPartSuite):
    examples = kit_examples()
    part = OutputParsing
    config = {"tools": {"parser": "hermes"}, "reasoning": {"parser": "think_tags"}}

    def requests(self):
        def named(parser):
            return request([1, 2], SamplingParams(tool_parser=parser))

        return st.sampled_from([None, "none", "hermes", "absent"]).map(named)


class TestPromptEmbeddings(StepPartSuite):
    examples = kit_examples()
    part = PromptEmbeddings
    options = {"enabled": True}
    config = {"plugin": {"prompt_embeddings": {"enabled": True}}}
    prompts = [
        {"prompt_embeds": ROWS},
        {"prompt_embeds": torch.from_numpy(ROWS).to(torch.bfloat16)},
        {"prompt_parts": ["ab", ROWS, [1, 2]]},
        {
            "prompt_embeds": ROWS[:1],
            "prompt_token_ids": [5, None, 6],
            "prompt_is_token_ids": [True, False, True],
        },
    ]

    def requests(self):
        def with_rows(mask, rows, resumable):
            count = len(mask) - sum(mask) if mask else rows
            return request(
                [7 if known else 0 for known in mask] or [0] * rows,
                prompt_embeds=ROWS[:count] if count else None,
                prompt_is_token_ids=mask or None,
                resumable=resumable,
            )

        masks = st.lists(st.booleans(), max_size=5).filter(lambda mask: mask.count(False) < 4)
        return st.builds(with_rows, masks, st.integers(1, 3), st.sampled_from([False] * 9 + [True]))


class OfLayers(Adapters):
    """Adapters of the linear layers that the kit computes."""

    contract = 1

    def worker_half(self, context):
        ops = SimpleNamespace(context=SimpleNamespace(dtype=torch.float32))
        ops.add_lora = functools.partial(Ops.add_lora, ops)
        rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8, "o_proj": 16}
        names = {f"model.layers.{n}.self_attn.{x}": rows[x] for n in range(2) for x in rows}
        matrices = {
            name: LinearMatrix(name, (rows, 16), range(rows), range(16))
            for name, rows in names.items()
        }
        loaded = SimpleNamespace(ops=ops, matrices=matrices)
        return super().worker_half(dataclasses.replace(context, loaded=loaded))


def pixels(number):
    return np.full((1, 1, 3), 40 * number, np.uint8)


def colour(number):
    return Image(1, 1, pixels(number).tobytes())


class Colours(MediaFormat):
    """Images are a token that begins them and three more."""

    placeholder, placeholder_id, token_id = "<image>", 1, 2
    begin_ids, end_ids, num_tokens = (1,), (), 3
    item_shape, settings = (1, 1, 3), "colours"
    processor, processor_settings = square_images.__file__, {"side": 1}


class SeesColours(ScriptedModel):
    contract = 1

    @classmethod
    def media_format(cls, config, files):
        return Colours()


class Eye:
    """Embeddings are the colours times a weight."""

    weight = 1

    def encode_media(self, modality, items):
        return [item.view(3, 1).float().repeat(1, 16) * self.weight + 1 for item in items]


class TestAdapters(StepPartSuite):
    examples = kit_examples()
    part = Adapters


class TestAdaptersOfLayers(StepPartSuite):
    examples = kit_examples()
    part = OfLayers
    shares = True
    calls = [("list", {}), ("resolve", {"loras": [{"name": "a0", "id": 1}]})]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def adapters(cls, tmp_path_factory):
        base = tmp_path_factory.mktemp("adapters")
        paths = {f"a{n}": str(base / f"a{n}") for n in range(3)}
        cls.contents = {}
        for number, (name, path) in enumerate(paths.items()):
            write_tensors(Path(path), "model.layers.0.self_attn.k_proj", 2 + number, rows=8)
            cls.contents[name] = content_hash(*read_files(path))
        cls.config = {"adapters": {"max_loras": 2, "max_cpu_loras": 3, "paths": paths}}

    def requests(self):
        def with_adapter(prompt, name):
            content = self.contents.get(name, "")
            return request(prompt, lora=name and LoRARequest(name, 1, "", content))

        names = st.sampled_from(["a0", "a1", "a2", "unknown", None])
        return st.builds(with_adapter, PROMPTS, names)


class TestEncoders(StepPartSuite):
    examples = kit_examples()
    part = Encoders
    options = {"budget_tokens": 8}
    components = {"models": {"SeesColours": SeesColours}}
    model_config = ModelConfig(
        architecture="SeesColours", hf={}, vocab_size=300, max_position_embeddings=64
    )
    media = [
        ([5, 1, 6], {"image": [colour(0)]}),
        ([1, 1, 1], {"image": [colour(1), colour(0), colour(1)]}),
        ([5, 6], {"image": []}),
    ]

    def loaded(self):
        return SimpleNamespace(model=Eye())

    def change_weights(self, loaded):
        loaded.model.weight += 1

    def requests(self):
        def with_items(items, is_cut):
            ids, features = [5], []
            for number in items:
                features.append(
                    MultiModalFeature(f"x{number}", len(ids) + 1, 3, data=pixels(number))
                )
                ids += [1, 2, 2, 2, 6]
            return request(ids[: -3 if is_cut else None] or [5], features=features)

        items = st.lists(st.integers(0, 4), max_size=3)
        return st.builds(with_items, items, st.sampled_from([False] * 9 + [True]))


def test_all_builtins_are_tested():
    assert_tests_builtins("step_parts", "part", globals())


class TestStatistics(StepPartSuite):
    examples = kit_examples()
    part = RequestStatistics
    config = {"stats": {"request_metrics": True}}


def test_the_suite_hashes_blocks_of_live_requests():
    live = Request(request([*range(32)]))
    first, second = block_hashes(live, 2)
    assert first != second
    assert block_hashes(live, 1) == [first]


class TestRetention(StepPartSuite):
    examples = kit_examples()
    part = PrefixRetention
    options = {"share": 0.5, "max_seconds": 60}

    def requests(self):
        wishes = st.builds(
            requests.Retention, st.sampled_from(["a", "b", ""]), st.sampled_from([0.5, 1e9, -1.0])
        )
        return st.builds(
            lambda prompt, retention: request(prompt, retention=retention),
            PROMPTS,
            st.none() | wishes,
        )


class TestKVCanary(StepPartSuite):
    examples = kit_examples()
    part = KVCanary
    config = {"debug": {"kv_canary": True}}


class TestKVTransfer(StepPartSuite):
    examples = kit_examples()
    part = KVTransfer
    config = {"kv_connector": {"stores": ["memory"]}}

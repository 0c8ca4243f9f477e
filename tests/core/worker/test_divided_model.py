"""A rank's share of a model: its memory, its file in the weight cache, sizes that do not fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from unittest import mock

import pytest
import torch
from support.broken.loaders import CutsByItself, write
from support.broken.quantizations import Right
from support.builtins.model_harness import Runner, open_loader
from support.samples import Sample

from hardpoint import typed
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.builtin_plugins.ops.torch import TorchOps
from hardpoint.core.weights import shares
from hardpoint.core.weights.planned_model import hold_weights
from hardpoint.core.weights.quantized_weights import QuantizedWeights
from hardpoint.core.weights.shares import build_share
from hardpoint.host.boundary.checked_model import CheckedModel, checked_weights
from hardpoint.host.system.memory import MemoryLimit, estimate_memory
from hardpoint.host.system.weight_cache import WeightCache
from hardpoint.host.system.weight_key import cache_key
from hardpoint.plugins import (
    EngineConfig,
    LoaderContext,
    ModelContext,
    ModelError,
    OpsContext,
    QuantizationContext,
    WeightLoader,
    WorkerInfo,
    Wrapper,
)
from hardpoint.plugins.cache_memory import CacheMemory
from hardpoint.plugins.component import Source
from hardpoint.plugins.config_tables import QuantizationConfig, WeightCacheConfig
from hardpoint.plugins.parallel import Cut, Parallel, SingleRank
from hardpoint.testing import run_ranks

CPU = torch.device("cpu")
SOURCE = Source("Llama", "tests:Llama", "hardpoint", "1", "test")
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SMOLLM2 = TINY | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


class RowOps(TorchOps):
    """Operations whose packed matrices may be kept."""

    contract = 1
    layout = "rows"

    def pack(self, weight):
        return weight.clone()


class SameLoader(Sample, DummyLoader, contract=1):
    """Random weights that may be kept."""

    def fingerprint(self):
        return "the same"


@pytest.fixture
def loader(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return open_loader(SameLoader, tmp_path)


def build(config, parallel):
    ops = OpsContext(name="rows", options=None, dtype=torch.float32, device=CPU)
    return Llama(
        ModelContext(
            name="Llama",
            options=None,
            config=config,
            dtype=torch.float32,
            device=CPU,
            max_model_len=64,
            ops=RowOps(ops),
            parallel=parallel,
        )
    )


def load(loader, model):
    checked = CheckedModel(model, SOURCE)
    model.load_weights(checked_weights(loader, SOURCE, checked.shapes, checked.cuts))


class Halved(CutsByItself):
    """Changes weights, of a loader that cuts by itself."""

    def weights(self, shapes):
        return ((name, weight / 2) for name, weight in super().weights(shapes))


class Tripled(Sample, Wrapper[WeightLoader], WeightLoader, contract=1):
    """The same, of another loader."""

    def weights(self, shapes):
        return ((name, weight * 3) for name, weight in self.wrapped.weights(shapes))


class Plain(Sample, Wrapper[WeightLoader], WeightLoader, contract=1):
    """Does what another loader does."""


class Both(Sample, Wrapper[WeightLoader], WeightLoader, contract=1):
    """Overrides both methods."""

    def weights(self, shapes):
        raise AssertionError("it is not called")

    def cut_weights(self, shapes, cuts):
        return self.wrapped.cut_weights(shapes, cuts)


def wrapped(kind, loader):
    options = Wrapper.Options(wraps="it")
    files = loader.context.files
    return kind(LoaderContext(name="w", options=options, files=files, creator=lambda _: loader))


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda path: open_loader(CutsByItself, path), 1),
        (lambda path: open_loader(Halved, path), 0.5),
        (lambda path: wrapped(Tripled, open_loader(CutsByItself, path)), 3),
        (lambda path: wrapped(Plain, wrapped(Tripled, open_loader(CutsByItself, path))), 3),
        (lambda path: wrapped(Tripled, open_loader(Halved, path)), 1.5),
        (lambda path: wrapped(Both, open_loader(CutsByItself, path)), 1),
    ],
    ids=["itself", "subclass", "wrapper", "wrapped twice", "wrapped subclass", "both"],
)
def test_who_overrides_weights_alone_changes_what_is_cut(tmp_path, make, factor):
    _, tensors = write(tmp_path)
    shapes = {name: tuple(weight.shape) for name, weight in tensors.items()}
    cuts = {"embed.weight": Cut(0, 2, 5), "norm.weight": Cut(0, 1, 2)}
    found = dict(checked_weights(make(tmp_path), SOURCE, shapes, cuts))
    assert found.keys() == tensors.keys()
    for name, weight in found.items():
        whole = tensors[name] * factor
        assert torch.equal(weight, cuts[name].of(whole) if name in cuts else whole), name


def key_of(loader, model):
    return cache_key(loader, model, model.context.ops, QuantizationConfig(), [])


@torch.inference_mode()
def logits_of(model):
    return Runner(model, dtype=torch.float32).logits([("a", [1, 60, 31, 30])])


def test_each_rank_keeps_a_file_of_its_own_and_maps_it_later(loader, tmp_path):
    whole = build(loader.config(), Parallel())
    load(loader, whole)
    expected = logits_of(whole)
    config, folder = WeightCacheConfig(path=str(tmp_path / "cache")), tmp_path / "cache"

    def first(tensor):
        model = build(loader.config(), Parallel(tensor))
        load(loader, model)
        cache = WeightCache(config)
        assert not cache.load(key_of(loader, model), model)
        cache.save(key_of(loader, model), model)
        cache.close()

    def later(tensor):
        model = build(loader.config(), Parallel(tensor))
        assert WeightCache(config).load(key_of(loader, model), model)
        return model.packed_weights()["model.embed_tokens.weight"].clone(), logits_of(model)

    run_ranks(2, first)
    assert len(list(folder.iterdir())) == 2
    for rank, (table, logits) in enumerate(run_ranks(2, later)):
        assert table.shape == (31, 48)
        assert bool(table[-1].any()) is (rank == 0)  # 61 rows: the second rank has a row of zeros
        assert torch.allclose(logits, expected, atol=1e-5)
    assert not WeightCache(config).load(key_of(loader, whole), build(loader.config(), Parallel()))


def test_what_a_rank_computes_is_part_of_the_key(loader):
    shares = {
        "alone": Parallel(),
        "first stage": Parallel(stage=0, num_stages=2),
        "last stage": Parallel(stage=1, num_stages=2),
    }
    keys = {what: key_of(loader, build(loader.config(), share)) for what, share in shares.items()}
    for expert in (False, True):

        def in_rank(tensor, expert=expert):
            return key_of(loader, build(loader.config(), Parallel(tensor, expert=expert)))

        for size in (2, 3):
            keys |= {(size, expert, rank): key for rank, key in enumerate(run_ranks(size, in_rank))}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys) == 13


def estimate(loader, config, parallel):
    model = build(config, parallel)
    checked = CheckedModel(model, SOURCE)
    engine = typed.convert({"kv_cache": {"num_blocks": 4}}, EngineConfig, path="")
    quantized = QuantizedWeights(engine, model, checked.cuts, {}.__getitem__)
    weights = hold_weights(model, checked, loader, SOURCE, quantized)
    limit = MemoryLimit(1 << 40, "test")
    request = CacheMemory.of_rank(engine, WorkerInfo(100, 0), model.context.max_model_len)
    return estimate_memory(model, engine, weights, request, limit)


def test_the_estimate_is_of_the_weights_of_the_rank(loader):
    config = dataclasses.replace(loader.config(), vocab_size=999)
    shapes = build(config, Parallel()).weight_shapes()
    matrices = 4 * sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    norms = 4 * sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1)
    table = 4 * 999 * 48  # the tied embedding: the head has a copy in another layout
    whole = estimate(loader, config, Parallel())
    assert whole.weights == matrices + norms + table
    assert whole.loading == table  # the largest matrix
    for size in (2, 3):
        parts = run_ranks(size, lambda tensor: estimate(loader, config, Parallel(tensor)))
        assert sum(part.weights for part in parts) == matrices + size * norms + table
        assert parts[0].loading == 4 * -(-999 // size) * 48
        # The widest layer is that of hidden states now: half of the MLP is, and a third is less.
        assert {part.step - whole.step for part in parts} == {-4 * 64 * (96 - 48) * 4}
    stages = [estimate(loader, config, Parallel(stage=stage, num_stages=2)) for stage in (0, 1)]
    # One has the embedding, the other one the head.
    assert sum(stage.weights for stage in stages) == matrices + norms + table


def test_a_table_that_is_not_packed_is_no_copy_in_the_estimate(loader, monkeypatch):
    table = 4 * 61 * 48
    config = dataclasses.replace(loader.config(), hf=TINY | {"tie_word_embeddings": True})
    copied = estimate(loader, config, Parallel()).weights
    monkeypatch.setattr(RowOps, "pack", lambda self, weight: weight)
    assert estimate(loader, config, Parallel()).weights == copied - table


def test_plain_torch_packs_no_bfloat16_where_the_processor_cannot(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    ops = TorchOps(OpsContext(name="torch", options=None, dtype=torch.bfloat16, device=CPU))
    weight = torch.ones(3, 4, dtype=torch.bfloat16)
    packed = ops.pack(weight)
    assert packed is weight
    assert ops.linear(packed, (3, 4))(weight).tolist() == [[4.0] * 3] * 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_the_estimate_of_matrices_that_multiply_themselves(loader, tied, own):
    class Says(Right):
        contract = 1
        own_linear = own

        def stored_bytes(self, shape):
            return 1

    config = dataclasses.replace(loader.config(), hf=TINY | {"tie_word_embeddings": tied})
    model = build(config, Parallel())
    checked = CheckedModel(model, SOURCE)
    engine = typed.convert({"quantization": {"use": "says"}}, EngineConfig, path="")
    scheme = Says(QuantizationContext(name="says", options=None, device=CPU, dtype=torch.float32))
    quantized = QuantizedWeights(engine, model, {}, lambda _: (scheme, SOURCE))
    held = hold_weights(model, checked, loader, SOURCE, quantized)
    table, count = "model.embed_tokens.weight", 61 * 48
    products = [weight.num_bytes for name, weight in held.items() if name.endswith("_proj.weight")]
    # The operations here have no kernels: codes are dequantised, what multiplies itself is not.
    assert set(products) == {1} if own else min(products) == 4 * 48 * 48
    assert held[table].num_bytes == 4 * count * (1 + tied)
    assert held[table].loading_bytes == 9 * count
    if not tied:
        assert held["lm_head.weight"].num_bytes == (1 if own else 4 * count)


def test_layers_with_windows_may_have_angles_of_their_own(loader):
    steps = []
    for windows in ([None, None], [None, 8], [8, 8]):
        config = dataclasses.replace(loader.config(), hf=TINY)
        with mock.patch.object(Llama, "windows", lambda self, found=windows: found):
            steps.append(estimate(loader, config, Parallel()).step)
    length = build(loader.config(), Parallel()).context.max_model_len
    assert [step - steps[0] for step in steps] == [0, 4 * length * 8, 0]


class Rank(SingleRank):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 2, "9 attention heads cannot be divided among 2 ranks; 3 would do"),
        ({}, 9, "1536 columns of the MLP cannot be divided among 9 ranks; 3 would do"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            3,
            "4 key and value heads cannot be divided among 3 ranks; 2, 4, 12 would do",
        ),
        (
            {"intermediate_size": 1535},
            3,
            "1535 columns of the MLP cannot be divided among 3 ranks; no size up to 64 would do",
        ),
    ],
)
def test_sizes_that_would_do_are_those_of_the_whole_model(loader, changes, size, message):
    hf = SMOLLM2 | changes
    config = dataclasses.replace(loader.config(), hf=hf)
    for rank in (0, size - 1):
        with pytest.raises(ModelError) as refused:
            build_share(lambda share: build(config, share), Parallel(Rank(rank, size)))
        assert str(refused.value) == f"parallel.tensor: {message}"


def test_only_sizes_that_can_fit_are_tried_and_only_for_a_while(monkeypatch):
    clock, tried = itertools.count(0.0, 0.3), []
    monkeypatch.setattr(shares, "time", mock.Mock(monotonic=lambda: next(clock)))

    def create(share):
        tried.append(share.tensor.size)
        share.share(48, "heads")
        return mock.Mock()

    with pytest.raises(ModelError) as refused:
        build_share(create, Parallel(Rank(0, 5)))
    assert tried == [5, 2, 3, 4]
    message = "48 heads cannot be divided among 5 ranks; 2, 3, 4 would do (sizes above 5 were not "
    assert str(refused.value) == f"parallel.tensor: {message}tried)"


def test_a_size_that_fits_is_built_once(loader):
    built = []

    def create(share):
        built.append(share)
        return build(loader.config(), share)

    share = Parallel(Rank(1, 3))
    model = build_share(create, share)
    assert built == [share]
    assert model.weight_cuts()["model.layers.0.self_attn.q_proj.weight"] == Cut(0, 16, 32)

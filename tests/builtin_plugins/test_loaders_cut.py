"""Loaders give a rank its part of each weight, and read, or dequantise, no more of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.builtins.checkpoint_harness import (
    finish,
    permute_as_llama_cpp,
    quantised,
    random_model,
)
from support.builtins.model_harness import open_loader, scheme

from hardpoint.builtin_plugins.loaders import safetensors as safetensors_loader
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.plugins import ModelError, WeightFormat
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedWeight

KINDS = gguf.GGMLQuantizationType
HEADS, HEAD_SIZE, COLUMNS = 3, 8, 512
ROWS = HEADS * HEAD_SIZE
Q, UP, BIAS = (
    f"model.layers.0.{name}"
    for name in ("self_attn.q_proj.weight", "mlp.up_proj.weight", "self_attn.q_proj.bias")
)
SHAPES = {Q: (ROWS, COLUMNS), UP: (ROWS, COLUMNS), BIAS: (ROWS,)}


def write_stored(path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Write one block of a Llama with a quantised, permuted q_proj and a bias."""
    writer, source = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    numbers = {
        "embedding_length": ROWS,
        "feed_forward_length": COLUMNS,
        "block_count": 1,
        "attention.head_count": HEADS,
        "context_length": 64,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    weight = source.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    data, _ = quantised(weight, kind)
    writer.add_tensor("token_embd.weight", weight[:5])
    for name in ("attn_q", "ffn_up"):
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_q.bias", np.arange(ROWS, dtype=np.float32))
    finish(writer)
    return path


DEQUANTISED = ("F32", "F16", "BF16", "IQ1_S")
"""Types that the loader yields as numbers."""


@pytest.fixture(scope="module", params=[*DEQUANTISED, "Q8_0", "Q4_1", "Q5_0", "Q6_K"])
def stored(request, tmp_path_factory) -> tuple[GGUFLoader, gguf.GGMLQuantizationType]:
    kind = KINDS[request.param]
    path = write_stored(tmp_path_factory.mktemp("gguf") / "tiny.gguf", kind)
    return open_loader(GGUFLoader, path), kind


def part(draw, length: int) -> tuple[int, int]:
    start = draw(st.integers(0, length))
    return start, draw(st.integers(start, length))


@st.composite
def some_cuts(draw) -> dict[str, Cut]:
    cuts = {}
    for name, shape in SHAPES.items():
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            cuts[name] = Cut(dim, *part(draw, shape[dim]))
    return cuts


def numbers(weight: torch.Tensor | QuantizedWeight, cut: Cut | None = None) -> torch.Tensor:
    """Return the weights of a loader, cut if it is the whole of blocks that a cut divides."""
    if isinstance(weight, torch.Tensor):
        return weight
    matrix = scheme(weight.scheme).read(weight)
    assert matrix.shape == weight.shape
    is_whole = cut is not None and matrix.shape != cut.shape((ROWS, COLUMNS))
    return cut.of(matrix.dequantize()) if is_whole else matrix.dequantize()


def test_any_part_of_a_gguf_tensor_is_that_of_the_whole(stored):
    loader, kind = stored
    yielded = dict(loader.weights(SHAPES))
    assert isinstance(yielded[UP], QuantizedWeight) == (kind.name not in DEQUANTISED)
    whole = {name: numbers(weight) for name, weight in yielded.items()}
    assert {name: tuple(w.shape) for name, w in whole.items()} == SHAPES

    @settings(max_examples=40, deadline=None)
    @given(cuts=some_cuts())
    def check(cuts):
        for name, part in loader.cut_weights(SHAPES, cuts):
            cut = cuts.get(name)
            expected = whole[name] if cut is None else cut.of(whole[name])
            assert torch.equal(numbers(part, cut), expected), (name, cut)

    check()


def test_formats_describe_what_is_yielded(stored):
    loader, kind = stored
    formats, yielded = loader.formats(SHAPES), dict(loader.weights(SHAPES))
    assert formats.keys() == SHAPES.keys()
    assert formats[BIAS] == WeightFormat("float32", 4 * ROWS)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    dtypes = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for name in (Q, UP):
        stored_format, weight = formats[name], yielded[name]
        assert stored_format.name == dtypes.get(kind.name, kind.name.lower())
        assert stored_format.num_bytes == ROWS * COLUMNS // block * size
        assert stored_format.is_quantized == isinstance(weight, QuantizedWeight)
        if stored_format.stored is not None:
            assert stored_format.stored.scheme == stored_format.name == weight.scheme
            assert stored_format.stored.shape == weight.shape
            (outline,), (blocks,) = stored_format.stored.tensors.values(), weight.tensors.values()
            assert outline.is_meta
            assert (outline.shape, outline.dtype) == (blocks.shape, blocks.dtype)
            scheme(stored_format.name).check(stored_format.stored)


def test_parts_of_q_follow_the_order_of_hugging_face(tmp_path):
    path = write_stored(tmp_path / "tiny.gguf", KINDS.F32)
    loader = open_loader(GGUFLoader, path)
    stored = next(t for t in open_gguf(path).tensors if t.name == "blk.0.attn_q.weight").data
    cut = Cut(0, HEAD_SIZE, 2 * HEAD_SIZE)
    (part,) = [w for name, w in loader.cut_weights(SHAPES, {Q: cut}) if name == Q]
    expected_part = stored[HEAD_SIZE : 2 * HEAD_SIZE]
    assert np.array_equal(permute_as_llama_cpp(part.numpy(), 1), expected_part)


def around(block: int, column: int) -> int:
    """Return the end of the block that a column ends in."""
    return -(-column // block) * block


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The number of bytes that each call has read, of the file."""
    counts: list[int] = []
    dequantize, from_numpy = gguf.quants.dequantize, torch.from_numpy

    def dequantized(data, kind):
        counts.append(data.nbytes)
        return dequantize(data, kind)

    def taken(data):
        counts.append(data.nbytes if data.dtype == np.uint8 else 0)
        return from_numpy(data)

    monkeypatch.setattr(gguf.quants, "dequantize", dequantized)
    monkeypatch.setattr(torch, "from_numpy", taken)
    return counts


@pytest.mark.parametrize(
    ("name", "cut", "expected"),
    [
        (UP, None, lambda _block: ROWS * COLUMNS),
        (UP, Cut(0, 4, 7), lambda _block: 3 * COLUMNS),
        (UP, Cut(0, ROWS, ROWS), lambda _block: 0),
        (UP, Cut(1, 256, 512), lambda _block: ROWS * 256),
        (UP, Cut(1, 250, 270), lambda block: ROWS * (around(block, 270) - 250 // block * block)),
        (UP, Cut(1, 0, 256, ((256, 512),)), lambda _block: ROWS * COLUMNS),
        (UP, Cut(0, 0, 3, ((9, 11),)), lambda _block: 5 * COLUMNS),
        (Q, Cut(0, HEAD_SIZE, 2 * HEAD_SIZE), lambda _block: HEAD_SIZE * COLUMNS),
        (Q, Cut(0, HEAD_SIZE + 3, HEAD_SIZE + 5), lambda _block: HEAD_SIZE * COLUMNS),
        (Q, Cut(1, 0, 256), lambda _block: ROWS * 256),
        (BIAS, Cut(0, 2, 4), lambda _block: HEAD_SIZE),
    ],
)  # fmt: skip
def test_no_more_is_read_than_the_blocks_of_a_part(stored, read, name, cut, expected):
    loader, kind = stored
    loader.config()
    read.clear()
    list(loader.cut_weights({name: SHAPES[name]}, {} if cut is None else {name: cut}))
    block, size = (1, 4) if name == BIAS else gguf.GGML_QUANT_SIZES[kind]
    count = expected(block)
    if cut is not None and cut.start == 250 and kind.name not in DEQUANTISED:
        count = ROWS * COLUMNS  # the scheme's blocks are not divided, but taken in whole rows
    assert sum(read) == count // block * size


def test_three_ranks_read_the_demo_model_once_together(demo_loader, read):
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (576, 576),
        "model.layers.0.self_attn.o_proj.weight": (576, 576),
        "model.layers.0.mlp.down_proj.weight": (576, 1536),
    }
    whole = {name: numbers(weight) for name, weight in demo_loader.weights(shapes)}
    together = sum(read)
    read.clear()
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in shapes}
    dims = dict(zip(shapes, (0, 1, 1), strict=True))
    for rank in range(3):
        cuts = {
            name: Cut(dim, shapes[name][dim] * rank // 3, shapes[name][dim] * (rank + 1) // 3)
            for name, dim in dims.items()
        }
        for name, weight in demo_loader.cut_weights(shapes, cuts):
            parts[name].append(numbers(weight))
    for name, weights in parts.items():
        assert torch.equal(torch.cat(weights, dims[name]), whole[name]), name
    assert sum(read) == together  # 192 and 512 are whole blocks


def test_a_weight_of_another_shape_is_refused_before_it_is_cut(stored, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file({UP: torch.zeros(4, 6)}, tmp_path / "model.safetensors")
    message = f"model: weight '{UP}' has shape "
    for loader, shape in (
        (stored[0], (ROWS, COLUMNS)),
        (open_loader(SafetensorsLoader, tmp_path), (4, 6)),
    ):
        with pytest.raises(ModelError) as refused:
            list(loader.cut_weights({UP: (2 * shape[0], shape[1])}, {UP: Cut(0, 0, shape[0])}))
        expected = f"{message}{shape}, the model needs {(2 * shape[0], shape[1])}"
        assert str(refused.value) == expected


def test_safetensors_take_slices_of_what_is_cut(tmp_path, monkeypatch):
    random_model("Llama").save_pretrained(tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    weights = random_model("Llama").state_dict()
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    cuts = {
        name: Cut(len(s) - 1, 1, s[-1] // 2) for name, s in shapes.items() if "layers.0" in name
    }
    whole: list[str] = []
    opened = safetensors_loader.safe_open

    class Recorded:
        """Records which tensors are read whole."""

        def __init__(self, *args, **more):
            self.file = opened(*args, **more)

        def __enter__(self):
            self.inner = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def get_tensor(self, name):
            whole.append(name)
            return self.inner.get_tensor(name)

    monkeypatch.setattr(safetensors_loader, "safe_open", Recorded)
    parts = dict(loader.cut_weights(shapes, cuts))
    assert set(whole) == shapes.keys() - cuts.keys()
    for name, weight in weights.items():
        expected = cuts[name].of(weight) if name in cuts else weight
        assert torch.equal(parts[name], expected), name


def test_random_weights_are_cut_of_the_same_whole(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Tiny"], "vocab_size": 8, "max_position_embeddings": 8}'
    )
    loader = open_loader(DummyLoader, tmp_path)
    whole, cuts = dict(loader.weights(SHAPES)), {Q: Cut(1, 3, 40), BIAS: Cut(0, 0, 2)}
    for name, part in loader.cut_weights(SHAPES, cuts):
        expected = cuts[name].of(whole[name]) if name in cuts else whole[name]
        assert torch.equal(part, expected)

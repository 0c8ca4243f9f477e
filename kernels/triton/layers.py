"""Functions of layers that compute row by row, between the products.

`Ops` of the contract has each with its docstring; in torch, with x.float() for x:

    rms_norm        x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    add_rms_norm    x.add_(delta); rms_norm(x, weight, eps)
    rotate          a, b = x.chunk(2, -1); x.copy_(cat((a * cos - b * sin, b * cos + a * sin), -1))
    silu_and_mul    gate, up = x.chunk(2, -1); F.silu(gate) * up
    gelu_and_mul    likewise with F.gelu(gate, approximate="tanh")
    scale, add      x.mul_(factor), x.add_(delta)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arithmetic import rounded
from .launch import Variant, power_of_2

__all__ = [
    "VARIANTS",
    "add",
    "add_rms_norm",
    "gelu_and_mul",
    "rms_norm",
    "rotate",
    "scale",
    "silu_and_mul",
]

# Of norms: rows up to so many columns are held in registers, of so many rows at a time. Wider rows
# are read twice, as many columns at a time as in the last entry. (columns, rows, warps)
_NORMS = ((64, 16, 4), (128, 16, 4), (256, 8, 4), (1024, 2, 4), (4096, 1, 8), (8192, 1, 16))

_ELEMENTS = 1024  # per program of gates, `scale` and `add`
_PAIRS = 2048  # per program of `rotate`


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,
    delta,
    weight,
    out,
    rows,
    heads,
    size,
    x_stride,
    head_stride,
    delta_stride,
    eps,
    ADDS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise some rows of x, each a head of a token; with ADDS, add delta to x first."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = (row < rows)[:, None]
    x += (row // heads * x_stride + row % heads * head_stride)[:, None]
    delta += (row * delta_stride)[:, None]
    out += (row * size)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    if IS_WHOLE:
        mask = is_row & (column < size)
        value = _sum_of(x + column, delta + column, mask, ADDS)
        squares = tl.sum(value * value, 1)
    else:
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, size, BLOCK):
            at = start + column
            value = _sum_of(x + at, delta + at, is_row & (at < size), ADDS)
            total += value * value
        squares = tl.sum(total, 1)
    factor = tl.rsqrt(squares / size + eps)[:, None]
    if IS_WHOLE:
        _store_norm(x, weight, out, value, factor, column, column < size, is_row, ADDS)
    else:
        for start in range(0, size, BLOCK):
            at = start + column
            value = _sum_of(x + at, delta + at, is_row & (at < size), ADDS)
            _store_norm(x, weight, out, value, factor, at, at < size, is_row, ADDS)


@triton.jit
def _sum_of(x, delta, mask, ADDS: tl.constexpr):
    """Return x or x + delta, rounded to the dtype of x, as float32."""
    value = tl.load(x, mask, 0).to(tl.float32)
    if ADDS:
        value += tl.load(delta, mask, 0).to(tl.float32)
        value = rounded(value, x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _store_norm(x, weight, out, value, factor, at, is_column, is_row, ADDS: tl.constexpr):
    """Store value * factor * weight; with ADDS, value in x."""
    mask = is_row & is_column
    if ADDS:
        tl.store(x + at, value.to(x.dtype.element_ty), mask)
    weights = tl.load(weight + at, is_column, 0).to(tl.float32)
    tl.store(out + at, rounded(value * factor * weights, out.dtype.element_ty), mask)


@triton.jit
def _rotate_kernel(
    x,
    angles,
    heads,
    half,
    x_stride,
    head_stride,
    angles_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate some heads of a row in place."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    is_pair = pair < half
    mask = (head < heads)[:, None] & is_pair[None, :]
    cos = tl.load(angles + row * angles_stride + pair, is_pair, 0)[None, :]
    sin = tl.load(angles + row * angles_stride + half + pair, is_pair, 0)[None, :]
    first = x + row * x_stride + head.to(tl.int64)[:, None] * head_stride + pair[None, :]
    a = tl.load(first, mask, 0).to(tl.float32)
    b = tl.load(first + half, mask, 0).to(tl.float32)
    tl.store(first, rounded(a * cos - b * sin, x.dtype.element_ty), mask)
    tl.store(first + half, rounded(b * cos + a * sin, x.dtype.element_ty), mask)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), precise for large |x|, where exp must not overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1 + small)


@triton.jit
def silu_times(gate, up):
    """Return silu(gate) * up of float32."""
    return gate * sigmoid(gate) * up


@triton.jit
def gelu_times(gate, up):
    """Return gelu(gate) * up of float32: the tanh form, since 1 + tanh(u) = 2 sigmoid(2 u)."""
    # Beyond 30 the sigmoid is 0 or 1, and the cube would overflow.
    near = tl.clamp(gate, -30.0, 30.0)
    return gate * sigmoid(1.5957691216057308 * (near + 0.044715 * near * near * near)) * up


@triton.jit
def _gate_kernel(x, out, size, x_stride, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    x += row * x_stride
    gate = tl.load(x + column, mask, 0).to(tl.float32)
    up = tl.load(x + size + column, mask, 0).to(tl.float32)
    y = gelu_times(gate, up) if IS_GELU else silu_times(gate, up)
    tl.store(out + row * size + column, rounded(y, out.dtype.element_ty), mask)


@triton.jit
def _scale_kernel(x, factor, size, x_stride, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    x += tl.program_id(0).to(tl.int64) * x_stride + column
    value = tl.load(x, mask, 0).to(tl.float32) * factor
    tl.store(x, rounded(value, x.dtype.element_ty), mask)


@triton.jit
def _add_kernel(x, delta, size, x_stride, delta_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    x += row * x_stride + column
    delta += row * delta_stride + column
    value = tl.load(x, mask, 0).to(tl.float32) + tl.load(delta, mask, 0).to(tl.float32)
    tl.store(x, rounded(value, x.dtype.element_ty), mask)


def _norm_tile(size: int) -> dict[str, int]:
    """Return the launch parameters of a norm."""
    columns, rows, warps = next((entry for entry in _NORMS if size <= entry[0]), _NORMS[-1])
    block = min(power_of_2(size), columns)
    return {"IS_WHOLE": block >= size, "ROWS": rows, "BLOCK": block, "num_warps": warps}


def _rotate_tile(heads: int, half: int) -> dict[str, int]:
    block = power_of_2(half)
    return {"HEADS": min(power_of_2(heads), max(_PAIRS // block, 1)), "BLOCK": block}


def _line_tile(size: int) -> dict[str, int]:
    """Return the launch parameters of gates, `scale` and `add`."""
    return {"BLOCK": min(power_of_2(size), _ELEMENTS)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `Ops.rms_norm` of x, [rows, size] or [rows, heads, size]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, x, weight, out, eps, adds=False)
    return out


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add delta to x in place, both [rows, size]; return `rms_norm` of the sum."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, delta, weight, out, eps, adds=True)
    return out


def _norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    adds: bool,
) -> None:
    if not x.numel():
        return
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    rows, tile = len(x) * heads, _norm_tile(size)
    _rms_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        x, delta, weight, out, rows, heads, size, x.stride(0), x.stride(-2), delta.stride(0), eps,
        ADDS=adds, **tile,
    )  # fmt: skip


def rotate(x: torch.Tensor, angles: torch.Tensor) -> None:
    """Rotate heads in place; see `Ops.rotate`."""
    if not x.numel():
        return
    rows, heads, size = x.shape
    tile = _rotate_tile(heads, size // 2)
    _rotate_kernel[(rows, triton.cdiv(heads, tile["HEADS"]))](
        x, angles, heads, size // 2, x.stride(0), x.stride(1), angles.stride(0), **tile
    )


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [rows, size] for x [rows, 2 * size], gate before up."""
    return _gate(x, is_gelu=False)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul`, with GELU in its tanh form."""
    return _gate(x, is_gelu=True)


def _gate(x: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    rows, size = len(x), x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if out.numel():
        tile = _line_tile(size)
        grid = rows, triton.cdiv(size, tile["BLOCK"])
        _gate_kernel[grid](x, out, size, x.stride(0), IS_GELU=is_gelu, **tile)
    return out


def scale(x: torch.Tensor, factor: float) -> None:
    """Multiply x [rows, size] by a number, in place."""
    if x.numel():
        tile = _line_tile(x.shape[1])
        grid = len(x), triton.cdiv(x.shape[1], tile["BLOCK"])
        _scale_kernel[grid](x, float(factor), x.shape[1], x.stride(0), **tile)


def add(x: torch.Tensor, delta: torch.Tensor) -> None:
    """Add delta to x in place, both [rows, size]."""
    if x.numel():
        tile = _line_tile(x.shape[1])
        grid = len(x), triton.cdiv(x.shape[1], tile["BLOCK"])
        _add_kernel[grid](x, delta, x.shape[1], x.stride(0), delta.stride(0), **tile)


def _variant(kernel: object, name: str, types: str, tile: dict[str, int], **more: int) -> Variant:
    """Return a variant with "argument:type" per argument."""
    constants = {key: value for key, value in tile.items() if key != "num_warps"} | more
    pairs = (part.split(":", 1) for part in types.split())
    return Variant(name, kernel, dict(pairs), constants, num_warps=tile.get("num_warps", 4))


def _norm_variant(size: int, weight: str, dtype: str = "bf16", *, adds: bool = False) -> Variant:
    name = f"{'add_' * adds}rms_norm, {dtype}, weight {weight}, {size} columns"
    types = (
        f"x:*{dtype} delta:*{dtype} weight:*{weight} out:*{dtype} rows:i32 heads:i32 size:i32:16"
        " x_stride:i32:16 head_stride:i32:16 delta_stride:i32:16 eps:fp32"
    )
    return _variant(_rms_norm_kernel, name, types, _norm_tile(size), ADDS=adds)


def _rotate_variant(heads: int, size: int) -> Variant:
    types = (
        "x:*bf16 angles:*fp32 heads:i32 half:i32:16 x_stride:i32:16 head_stride:i32:16"
        " angles_stride:i32:16"
    )
    name = f"rotate, bf16, {heads} heads of {size}"
    return _variant(_rotate_kernel, name, types, _rotate_tile(heads, size // 2))


_LINE = "size:i32:16 x_stride:i32:16"

VARIANTS: tuple[Variant, ...] = (
    _norm_variant(128, "bf16"),  # heads of Qwen3
    _norm_variant(256, "fp32"),  # heads of Gemma
    _norm_variant(1024, "bf16", adds=True),
    _norm_variant(4096, "bf16"),
    _norm_variant(4096, "bf16", adds=True),
    _norm_variant(4096, "fp32", adds=True),
    _norm_variant(8192, "bf16", adds=True),
    _norm_variant(65536, "bf16", adds=True),
    _norm_variant(4096, "fp32", "fp32", adds=True),
    _rotate_variant(32, 128),
    _rotate_variant(8, 256),
    *(
        _variant(
            _gate_kernel, f"{name}_and_mul, bf16, 14336 columns",
            f"x:*bf16 out:*bf16 {_LINE}", _line_tile(14336), IS_GELU=name == "gelu",
        )
        for name in ("silu", "gelu")
    ),
    _variant(
        _scale_kernel, "scale, bf16, 4096 columns", f"x:*bf16 factor:fp32 {_LINE}",
        _line_tile(4096),
    ),
    _variant(
        _add_kernel, "add, bf16, 4096 columns",
        f"x:*bf16 delta:*bf16 {_LINE} delta_stride:i32:16", _line_tile(4096),
    ),
)  # fmt: skip
"""Of Llama-8B, Qwen3-0.6B and Gemma, and the widest rows."""

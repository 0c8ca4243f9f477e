"""`backend`, `attention.use` and `ops.use`: which attention and operations a device gets."""

from __future__ import annotations

import pytest
import torch

from hardpoint import typed
from hardpoint.builtin_plugins.attention.native_cpu import NativeAttention
from hardpoint.errors import ConfigError, ModelError, PluginNotFoundError
from hardpoint.host.registry.backends import first_that_runs
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import AttentionContext, EngineConfig, OpsContext
from hardpoint.plugins.config import ConfigSources
from hardpoint.testing import load_ops

CPU = torch.device("cpu")
KINDS = ("attention_backends", "ops")


def resolve(sources=None, **tree):
    return resolve_plugins(typed.convert(tree, EngineConfig, path=""), ConfigSources(sources))


def names(plugins):
    return {kind: [entry.name for entry in plugins.entries(kind)] for kind in KINDS}


def opened(plugins, dtype=torch.float32):
    """Return the attention and operations of the CPU, as a worker opens them."""
    ops = plugins.create_for_device("ops", OpsContext, device=CPU, dtype=dtype)
    return opened_attention(plugins, dtype=dtype), ops


def opened_attention(plugins, **fields):
    fields = {"device": CPU, "dtype": torch.float32, "block_size": 16, **fields}
    return plugins.create_for_device("attention_backends", AttentionContext, **fields)


def test_by_default_the_worker_chooses_among_the_built_ins():
    plugins = resolve()
    assert names(plugins) == {key: ["native_cpu", "triton", "torch"] for key in KINDS}
    for component, kind in zip(opened(plugins), KINDS, strict=True):
        assert plugins.one(kind).name == component.name == "native_cpu"


@pytest.mark.parametrize("backend", ["native_cpu", "torch"])
def test_a_backend_is_a_pair(backend):
    plugins = resolve(backend=backend)
    assert names(plugins) == {key: [backend] for key in KINDS}
    assert [component.name for component in opened(plugins)] == [backend, backend]


def test_one_of_the_pair_can_be_named():
    plugins = resolve(backend="native_cpu", ops={"use": "torch"})
    assert names(plugins) == {"attention_backends": ["native_cpu"], "ops": ["torch"]}
    plugins = resolve(backend="torch", attention={"use": "native_cpu"}, ops={"use": "auto"})
    assert names(plugins) == {"attention_backends": ["native_cpu"], "ops": ["torch"]}


def test_the_error_about_an_unknown_backend_names_the_setting():
    message = r"^backend: no attention_backends component is called 'trition' \(did you mean "
    with pytest.raises(PluginNotFoundError, match=message):
        resolve(backend="trition", sources={"backend": "argument"})


def test_a_backend_that_does_not_run_on_the_device_is_an_error():
    plugins = resolve(backend="native_cpu", sources={"backend": "argument"})
    cuda = torch.device("cuda")
    with pytest.raises(ModelError, match=r"^backend: 'native_cpu' runs on cpu, the device is cuda"):
        plugins.create_for_device("ops", OpsContext, device=cuda, dtype=torch.float32)


def test_attention_and_operations_of_different_devices_are_refused():
    mine = "support.plugins.devices:"
    with pytest.raises(ConfigError) as refused:
        resolve(attention={"use": "native_cpu"}, ops={"use": f"{mine}CudaOps"})
    assert str(refused.value) == (
        "attention.use: 'native_cpu' runs on cpu, and ops.use: 'cuda_ops' on cuda; expected "
        "attention and operations of one device"
    )


def test_a_wrapper_of_auto_wraps_what_the_backend_is():
    wrapper = {"use": "support.plugins.devices:LoggedOps"}
    for backend, expected in (("auto", "native_cpu"), ("torch", "torch")):
        _, ops = opened(resolve(backend=backend, ops=wrapper))
        assert (ops.name, ops.wrapped.name) == ("logged_ops", expected)


def test_the_fallback_gives_the_reason_for_its_use():
    ops = load_ops(torch.float16, use="auto")
    assert ops.name == "torch"
    assert ops.context.reason == (
        "ops.use: 'native_cpu' computes in bfloat16, float32, the model's dtype is float16"
    )


AUTO_ONLY = "support.plugins.devices:AutoOnly"
REFUSED = (
    "kv_cache.dtype: the attention backend 'auto_only' stores 'auto', got 'int8'; "
    'attention.use = "torch" has it'
)


def test_a_backend_without_the_dtype_of_keys_and_values_is_refused():
    plugins = resolve(attention={"use": AUTO_ONLY})
    assert opened_attention(plugins).name == "auto_only"
    with pytest.raises(ModelError) as refused:
        opened_attention(plugins, cache_dtype="int8")
    assert str(refused.value) == REFUSED


def test_without_a_choice_a_backend_with_the_dtype_of_keys_and_values_runs(monkeypatch):
    monkeypatch.setattr(NativeAttention, "cache_dtypes", ("auto", "fp8"))
    attention = opened_attention(resolve(), cache_dtype="int8")
    assert attention.describe() == (
        "torch (kv_cache.dtype: the attention backend 'native_cpu' stores 'auto', 'fp8', got "
        """'int8'; attention.use = "torch" has it)"""
    )


def test_a_wrapper_has_the_dtypes_of_what_it_wraps():
    plugins = resolve(attention={"use": "support.plugins.devices:LoggedAttention"})
    attention = opened_attention(plugins, cache_dtype="int8")
    assert attention.wrapped.name == "native_cpu"
    options = {"logged_attention": {"wraps": AUTO_ONLY}}
    plugins = resolve(attention={"use": "support.plugins.devices:LoggedAttention"}, plugin=options)
    with pytest.raises(ModelError, match="^kv_cache.dtype: the attention backend 'auto_only' stor"):
        opened_attention(plugins, cache_dtype="int8")


@pytest.mark.parametrize(
    ("device", "failing", "expected"),
    [
        ("cpu", (), ("native_cpu", "")),
        ("cuda", (), ("triton", "")),
        ("cpu", ("native_cpu",), ("torch", "native_cpu fails")),
        ("cuda", ("triton",), ("torch", "triton fails")),
    ],
)
def test_each_device_has_a_first_choice_and_torch(device, failing, expected):
    plugins = resolve()

    def build(entry, reason):
        if entry.name in failing:
            raise ModelError(f"{entry.name} fails")
        return reason

    entries = {entry.name: entry for entry in plugins.entries("ops")}
    entry, reason = first_that_runs(entries, device, plugins.target, build)
    assert (entry.name, reason) == expected

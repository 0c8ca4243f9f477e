"""The plugin keeps every rule of hooks: the conformance kit checks it."""

from hardpoint_ollama import Ollama

from hardpoint.testing import HookSuite

pytest_plugins = ["hardpoint.testing"]


class TestOllama(HookSuite):
    hooks = Ollama

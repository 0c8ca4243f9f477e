"""Every built-in communicator passes the public conformance kit."""

from __future__ import annotations

import pytest
from support.kit_suites import assert_tests_builtins
from support.searching import kit_examples

from hardpoint.builtin_plugins.communicators.auto import AutoCommunicator
from hardpoint.builtin_plugins.communicators.shared_memory import SharedMemoryCommunicator
from hardpoint.builtin_plugins.communicators.torch import TorchCommunicator
from hardpoint.testing import CommunicatorSuite

pytest_plugins = ["hardpoint.testing"]


class TestTorchCommunicator(CommunicatorSuite):
    communicator = TorchCommunicator
    examples = kit_examples()
    buffered_bytes = 8 << 20  # it keeps a copy, however large


class TestSharedMemoryCommunicator(CommunicatorSuite):
    communicator = SharedMemoryCommunicator
    examples = kit_examples()


@pytest.mark.nightly  # it passes its calls on to one of the others
class TestAutoCommunicator(CommunicatorSuite):
    communicator = AutoCommunicator
    name = "auto"
    examples = kit_examples(0.3)
    sizes = (2,)


def test_all_builtins_are_tested():
    assert_tests_builtins("communicators", "communicator", globals())

"""Limits of time and random numbers of the conformance kit in its own tests."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from support.samples import end_threads, remove_left

from hardpoint.testing import AdapterResolverSuite, ExecutorSuite, StepPartSuite
from hardpoint.testing import component_suite as components
from hardpoint.testing import suite as kit_suite
from hardpoint.testing.general import suite as general_suite
from hardpoint.testing.kv import connector_session, connector_suite, peer_suite, store_place
from hardpoint.testing.reporting import calls, publisher_suite
from hardpoint.testing.running import (
    communicator_suite,
    executor_session,
    executor_suite,
    extension_checks,
    hook_suite,
    rank_programs,
    scripted_worker,
)
from hardpoint.testing.running.step_parts import rules as step_part_rules
from hardpoint.testing.timing.timed_suite import TimedSuite

_PATIENCE_S = 60.0
_LIMITS = (
    (AdapterResolverSuite, "max_seconds"),
    (TimedSuite, "max_wait_seconds"),
    (ExecutorSuite, "failure_seconds"),
    (StepPartSuite, "ready_seconds"),
    (calls, "_STILL_SECONDS"),
    (calls, "_WAIT_SECONDS"),
    (communicator_suite, "_CLOSE_SECONDS"),
    (communicator_suite, "_SECONDS"),
    (communicator_suite, "_SLACK_SECONDS"),
    (components, "_THREADS_END_S"),
    (connector_session, "_PATIENCE_SECONDS"),
    (connector_session, "_QUIET_SECONDS"),
    (connector_suite, "_CLOSE_SECONDS"),
    (connector_suite, "_STORE_SECONDS"),
    (connector_suite, "_THREAD_SECONDS"),
    (executor_session, "CALL_SECONDS"),
    (executor_session, "START_SECONDS"),
    (executor_suite, "_CLOSE_SECONDS"),
    (executor_suite, "_SLOW_SECONDS"),
    (extension_checks, "_SECONDS"),
    (general_suite, "_BUSY_SECONDS"),
    (general_suite, "_CLOSE_SECONDS"),
    (hook_suite, "_LIMIT_SECONDS"),
    (peer_suite, "_SLACK_SECONDS"),
    (publisher_suite, "_FIRST_SECONDS"),
    (publisher_suite, "_QUIET_SECONDS"),
    (rank_programs, "ABORT_SECONDS"),
    (scripted_worker, "_WAIT_SECONDS"),
    (step_part_rules, "_CALL_SECONDS"),
    (store_place, "_SLACK_SECONDS"),
)
"""Limits of waits for what a correct component does at once, however busy the machine."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for late events; report the first failing case, however large it is."""
    monkeypatch.setattr(kit_suite, "_SHRINKING_SECONDS", -1.0)
    for owner, name in _LIMITS:
        monkeypatch.setattr(owner, name, _PATIENCE_S)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """End and remove the leftovers of broken samples, and restore their settings."""
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    end_threads()
    remove_left()
    os.sched_setaffinity(0, affinity)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Let components that draw at random draw the same each time."""
    random.seed(0)
    torch.default_generator.manual_seed(0)  # without those of devices, which take a millisecond

"""Selection of the tests of a run: the default ones, --all, or --timing.

A test that takes long is marked `nightly`, one that depends on the machine's speed `timing`. Tests
that a decorator does not reach are named here: those inherited from suites, and single parameters.
"""

from __future__ import annotations

import random
import subprocess
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALWAYS_RUN = ("README.md", "docs/first-plugin.md")
"""Pages whose examples every run executes."""

_NIGHTLY = (
    # What a suite finds out about memory is shown by components that are broken.
    "tests/testing/test_*_conform.py::*::test_memory",
    "tests/builtin_plugins/test_draft_model.py::TestDraftModel::test_memory",
    "tests/testing/test_scheduling_conform.py::TestDefaultSchedulerWithOtherOptions::*",
    # Triton's interpreter takes seconds for what a GPU does in no time.
    "tests/testing/test_worker_conform.py::TestTritonOps::test_[!ag]*",
    "tests/testing/test_worker_conform.py::TestTritonAttention::test_[!c]*",
    "tests/testing/test_worker_conform.py::TestGemma3WithImages::test_weights",
    # One of each generation of vLLM's interface always runs.
    "tests/testing/test_foreign_conform.py::TestV0Factory::*",
    "tests/testing/test_foreign_conform.py::TestV0Class::*",
    "tests/testing/test_foreign_conform.py::TestV1Tokens::*",
    "tests/testing/test_foreign_conform.py::TestV1WithState::*",
    "tests/testing/test_foreign_conform.py::TestV2History::*",
    "tests/process/test_joined_engines.py::*[[]with_time]",
    "tests/process/test_live_changes_in_processes.py::test_random_*[[]two engines-*]",
    "tests/test_stranger_small.py::*[[]acme_ops]",
    "tests/test_stranger_small.py::*[[]acme_spans]",
    "tests/test_stranger_small.py::*[[]acme_ring]",
    "tests/builtin_plugins/test_sampler.py::TestDistribution::test_a_big_vocabulary_*[[]torch]",
    # Of the places and ways that are much alike, one or two always run.
    "tests/journal/test_replayed_schedules.py::test_engines_of_each_kind[[]own process-stores]",
    "tests/journal/test_replayed_schedules.py::test_engines_of_each_kind[[]in process-tensor 2]",
    "tests/journal/test_replayed_schedules.py::test_random_schedules[[]range([123]0, *",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]scheduler-*_requests]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]scheduler-add_request]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]scheduler-update]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_that_*[[]executor-sample_tokens]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_of_the_*[[]worker-__init__]",
    "tests/process/test_plugins_and_processes.py::test_a_copy_of_the_*[[]worker-start]",
    "tests/process/test_embedding.py::test_a_plain_program_without_a_guard[[]-c]",
    "tests/replicas/test_joining_engines.py::test_garbage_ends_its_engine_alone[[]frames[1234]]",
    "tests/features/adapters/test_adapter_scale.py::test_scales_share_*[[]process]",
    "tests/test_equality_real.py::test_fp32_tokens_do_not_depend_*[[]whole prompts]",
    "tests/test_equality_real.py::test_drafts_change_no_fp32_token[[]alone]",
    "tests/builtin_plugins/test_scheduler_step_time.py::test_tokens_are_the_same_*[[][13]]",
    "tests/builtin_plugins/test_stat_opentelemetry.py::test_a_collector_that_is_gone_*[[]grpc]",
    "tests/builtin_plugins/server/test_extensions.py::test_a_callback_that_holds_*[[]call_*]",
    "tests/kernels/test_kernel_paths.py::test_each_path_passes_the_suite[[]avx*2]",
    # tests/testing: what samples of the kit show, and components that are like others.
    "tests/testing/test_scripted_parts.py::*::test_memory",
    "tests/testing/test_scripted_parts.py::test_batched_equals_alone[[][bcnr]*]",
    "tests/testing/test_text_conform.py::Test[GS]*::test_threads",
    "tests/testing/test_kit_catches.py::test_correct_components_pass[[][BCD]*-*]",
    "tests/testing/test_scheduling_conform.py::Test*Weight::*",
    "tests/testing/test_scheduling_conform.py::TestTinyScheduler::*",
    "tests/testing/test_scheduling_conform.py::TestPolicyWithArguments::*",
    "tests/testing/test_communicators_conform.py::TestTorchCommunicator::test_[!crs]*",
)


_TIMING: tuple[str, ...] = (
    # tests/testing: costs of components, and leases and time-outs of what is correct.
    "tests/testing/test_*.py::Test*::test_speed",
    "tests/testing/test_output_parsers_*.py::Test*::test_linear",
    "tests/testing/test_kv_connectors_conform.py::TestStoresInTime::*",
    "tests/testing/*::Test*Peer*::test_leases",
    "tests/testing/*::Test*Peer*::test_offers",
    "tests/testing/*::Test*Peer*::test_waits",
)


class Selection:
    """A pytest plugin that deselects what a run leaves out, and counts it."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the options of the run."""
        self._all = bool(config.getoption("all"))
        self._timing = bool(config.getoption("timing"))
        self._seed = config.getoption("shuffle")
        self._left_out = 0

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out tests; order the files at random if there is a seed."""
        chosen = [item for item in items if self._is_chosen(item)]
        left_out = [item for item in items if not self._is_chosen(item)]
        self._left_out = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        if self._seed is not None:
            files = [list(group) for _, group in groupby(chosen, key=lambda item: item.path)]
            random.Random(self._seed).shuffle(files)
            chosen = [item for file in files for item in file]
        items[:] = chosen

    def _is_chosen(self, item: pytest.Item) -> bool:
        if _is(item, "timing", _TIMING):
            return self._timing
        return not self._timing and (self._all or not _is(item, "nightly", _NIGHTLY))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the count to the process that prints it."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["left_out"] = self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive the count of a worker; each of them collects all tests."""
        self._left_out = getattr(node, "workeroutput", {}).get("left_out", self._left_out)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many tests this run left out."""
        if self._left_out and not self._all:
            terminalreporter.write_line(f"{self._left_out} tests run only with scripts/test --all")


def _is(item: pytest.Item, marker: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a test has a marker, or its name matches a pattern."""
    if item.get_closest_marker(marker):
        return True
    return any(fnmatchcase(item.nodeid, pattern) for pattern in patterns)


def changed_pages() -> set[str]:
    """Return the paths of the pages changed since the merge base with `main`.

    All pages are new where there is no `main` to compare with.
    """
    try:
        base = _git("merge-base", "main", "HEAD").strip()
        changed = _git("diff", "--name-only", base, "--", "*.md")
        new = _git("ls-files", "--others", "--exclude-standard", "--", "*.md")
    except (OSError, subprocess.CalledProcessError):
        return {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    return {*changed.splitlines(), *new.splitlines()}


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

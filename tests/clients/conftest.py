"""Servers for third-party clients, and packages that `scripts/test --all` installs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.once import once
from support.tokenizer_folder import write_tokenizer


@pytest.fixture(scope="session")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `hardpoint serve` with the demo model."""
    log = (tmp_path_factory.mktemp("serve") / "log").open("w+")
    command = [sys.executable, "-m", "hardpoint", "serve", "smollm2", "--port", "0"]
    settings = ["--set", "max_model_len=2048", "--set", 'dtype="float32"']
    process = subprocess.Popen(
        [*command, *settings], stdout=subprocess.PIPE, stderr=log, text=True, cwd="/"
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        log.seek(0)
        assert "Serving smollm2 at http://" in line, log.read()
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(60)
        finally:
            process.kill()
    log.seek(0)
    logged = log.read()
    assert code == 0, logged
    assert "Traceback" not in logged, logged


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer."""

    def write(folder: Path) -> None:
        write_tokenizer(folder)

    return once(tmp_path_factory, "demo_tokenizer", write)


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The npm packages of `javascript/package.json`."""
    folder = os.environ.get("HARDPOINT_TEST_NODE_MODULES")
    if folder is None or shutil.which("node") is None:
        pytest.skip("needs node and the npm packages that scripts/test --all installs")
    return Path(folder)


@pytest.fixture(scope="session")
def evaluation_programs() -> Path:
    """The folder of programs of the environment with lm-eval and guidellm."""
    folder = os.environ.get("HARDPOINT_TEST_EVALUATION")
    if folder is None:
        pytest.skip("needs lm-eval and guidellm, which scripts/test --all installs")
    return Path(folder) / "bin"

"""The files of later weights: when they are removed, whatever an update comes to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from support.process.forked_python import forked_python

from hardpoint import ModelError
from hardpoint.calls import weights
from hardpoint.calls.weights import AsyncWeightUpdateGroup, TensorFolders, WeightFiles
from hardpoint.plugins import EngineConfig

TENSORS = {"w": torch.ones(4)}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The folder in the place of shared memory."""
    monkeypatch.setattr(weights, "_MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


class Engine:
    """Takes weights while `goes_on` is not set."""

    def __init__(self, updates):
        self.parts = SimpleNamespace(config=EngineConfig(model="x"))
        self.set_load(msgspec.structs.replace(self.parts.config.load, updates=tuple(updates)))
        self.goes_on, self.uses, self.calls = asyncio.Event(), asyncio.Event(), []

    def set_load(self, load):
        self.parts.config = msgspec.structs.replace(self.parts.config, load=load)

    async def call_utility(self, utility, part, method, arguments):
        del arguments
        assert (utility, part) == ("call_part", "weight_updates")
        self.calls.append(method)
        if method == "use":
            self.uses.set()
            await self.goes_on.wait()
        return True


class Weights(AsyncWeightUpdateGroup):
    def __init__(self, updates=()):
        self.engine = Engine(updates)
        super().__init__(self.engine, WeightFiles(updates))


async def test_an_update_that_is_cancelled_while_the_engine_takes_the_weights_is_whole(place):
    group = Weights()
    task = asyncio.create_task(group.update(TENSORS))
    await group.engine.uses.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    group.engine.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    load = group.engine.parts.config.load
    assert load.version == "1"
    assert [Path(path).parent.parent for path in load.updates] == [place]
    assert all(Path(path).exists() for path in load.updates)
    assert await group.update(TENSORS) == "2"


def test_tensors_of_an_update_that_fails_are_removed(place):
    async def main():
        group = Weights()
        load = msgspec.structs.replace(
            group.engine.parts.config.load, updates=("/gone.safetensors",)
        )
        group.engine.set_load(load)
        for _ in range(2):
            with pytest.raises(ModelError, match="gone"):
                await group.update(TENSORS)
        assert group.engine.calls == []

    asyncio.run(main())
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "lost"),
    [
        ("b", "the tensor 'a' of"),
        ("c", "the tensor 'a' of"),
        ("ac", None),
        ("abc", None),
        (None, "a safetensors file"),
    ],
)
@pytest.mark.parametrize("starts_with", [True, False])
async def test_tensors_of_an_overwritten_file_do_not_vanish(tmp_path, names, lost, starts_with):
    latest, other = tmp_path / "latest.safetensors", tmp_path / "other.safetensors"

    def write(path, names):
        save_file({name: torch.ones(1) for name in names}, path)

    write(latest, "ab")
    write(other, "b")
    group = Weights([str(latest)] if starts_with else ())
    group.engine.goes_on.set()
    if not starts_with:
        await group.update(latest)
    await group.update(other)
    before = group.engine.parts.config.load
    assert before.updates == (str(latest), str(other))
    if names is None:
        latest.unlink()
    else:
        write(latest, names)
    if lost is not None:
        for _ in range(2):  # an update that fails changes no names
            for path in [other] if names is None else [latest, other]:
                with pytest.raises(ModelError, match=f"latest.safetensors: expected {lost}"):
                    await group.update(path)
        assert group.engine.parts.config.load == before
        write(latest, "ab")
    await group.update(latest)
    updates = (str(latest),) if names == "abc" or lost else (str(other), str(latest))
    assert group.engine.parts.config.load.updates == updates


FORKS = """
import os, sys
from pathlib import Path
import torch
from hardpoint.builtin_plugins.step_parts.statistics.sinks import Sinks
from hardpoint.calls import weights
from hardpoint.toolkit.reloading.copies import CopiedPackages
weights._MEMORY = Path(sys.argv[1])

class Sink:
    def close(self):
        print("closed in", "the program" if os.getpid() == program else "a fork", flush=True)

program = os.getpid()
folders, copies = weights.TensorFolders("a-", "weights"), CopiedPackages()
sinks = Sinks({"": Sink()})
written = folders.write("w.safetensors", {"w": torch.ones(4)})
for closes in (False, True):
    if os.fork() == 0:
        if closes:
            own = folders.write("w.safetensors", {"w": torch.ones(4)})
            folders.keep(())
            copies.close()
            print("kept" if own.exists() else "removed")
        sys.exit()
    os.wait()
print([path.exists() for path in (written, copies._folder)])
folders.keep(())
copies.close()
print([path.exists() for path in (written, copies._folder)])
"""


def test_a_fork_leaves_what_its_parent_uses(place):
    output = forked_python().run(["-c", FORKS, str(place)], place, dict(os.environ)).stdout
    assert output.splitlines() == [
        "removed",
        "[True, True]",
        "[False, False]",
        "closed in the program",
    ]
    assert list(place.iterdir()) == []


PROGRAM = """
import sys, time
from pathlib import Path
import torch
from hardpoint.calls import weights
weights._MEMORY = Path(sys.argv[1])
folders = weights.TensorFolders("hardpoint-weights-", "weights")
print(folders.write("w.safetensors", {"w": torch.ones(4)}), flush=True)
time.sleep(600)
"""


def test_folders_of_a_program_that_was_killed_go_with_the_next_update(place, monkeypatch):
    started = forked_python().popen(["-c", PROGRAM, str(place)], stdout=subprocess.PIPE, text=True)
    with started as program:
        left = Path(program.stdout.readline().strip())
        monkeypatch.setattr(weights, "_ABANDONED_S", -1.0)
        other = place / "hardpoint-weights-of-nobody"
        files, lives = WeightFiles(), TensorFolders("hardpoint-weights-", "weights")
        try:
            kept = lives.write("w.safetensors", TENSORS)
            assert left.exists()  # its program runs
            other.touch()  # no folder
            program.send_signal(signal.SIGKILL)
            program.wait()
            monkeypatch.setattr(weights, "_ABANDONED_S", 60.0)
            files.after(EngineConfig(model="x"), TENSORS, None)
            assert left.exists()  # it is young: another program may be about to lock it
            os.utime(left, (0, 0))
            files.after(EngineConfig(model="x"), TENSORS, None)
            assert not left.exists()
            assert kept.exists()
            assert other.exists()
        finally:
            program.kill()
            files.keep(())
            lives.keep(())
    assert [path.name for path in place.iterdir()] == [other.name]

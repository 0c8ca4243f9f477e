"""The runner of benchmarks: engines take turns, and the first round warms up."""

from __future__ import annotations

import json
import sys

import engine_process
import engines
import pytest
from backends import Backend, Batch
from engines import Peer, opened, take_turns
from loads import LOADS, Load


class Recorded:
    """An engine that answers with the number of its question."""

    def __init__(self, name, order):
        self.name, self._order, self._count = name, order, 0

    def ask(self, question):
        self._order.append(self.name)
        self._count += 1
        return self._count


def test_engines_take_turns():
    order = []
    both = {name: Recorded(name, order) for name in ("a", "b")}
    answers = take_turns(both, LOADS["short"].rounds("short", 2))
    assert answers == {"a": [2, 3], "b": [2, 3]}
    assert order == ["b", "a", "a", "b", "b", "a"]


def test_loads():
    load = Load(3, (4, 6), (2, 5), shared=2, adapters=2)
    batch = load.batch("seed")
    assert load.batch("seed") == batch != load.batch("other")
    assert [len(ids) for ids in batch.prompts] == [prompt for prompt, _ in load.lengths()]
    assert len({tuple(ids[:2]) for ids in batch.prompts}) == 1
    assert batch.adapters == [0, 1, 0]
    assert load.tokens == load.generated == sum(batch.outputs)
    assert str(load) == "3 x (2 shared + 2-4)/2-5"
    assert LOADS["prefill"].tokens == 16 * 512
    assert LOADS["prefill"].generated == 16


def test_an_engine_that_does_not_open_is_reported(monkeypatch, tmp_path, capsys):
    program = tmp_path / "program.py"
    answer = json.dumps({"version": "1", "settings": "none"})
    program.write_text(
        "import sys\n"
        "if sys.argv[1] == 'broken': raise ValueError('no such model')\n"
        f"print({engine_process.MARK!r} + {answer!r}, flush=True)\n"
        "for line in sys.stdin: pass\n"
    )
    monkeypatch.setattr(engines, "PROGRAM", str(program))
    peers = {"first": Peer("works"), "second": Peer("broken")}
    with opened(peers, tmp_path, {"hardpoint": sys.executable}) as opened_engines:
        assert list(opened_engines) == ["first"]
    assert "second is not measured: ValueError: no such model" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no such model"), opened({"a": peers["second"]}, tmp_path):
        pass


class Counting(Backend):
    """An engine that generates and drafts without a model."""

    total = 0

    def generate(self, batch):
        self.total += 3
        return [[7] * count for count in batch.outputs]

    def drafts(self):
        return self.total, self.total - 1


def test_batches():
    engine = Counting()
    assert engine_process.run_batch(engine, Batch([[1]], [2])).keys() == {"seconds", "cpu"}
    answer = engine_process.run_batch(engine, Batch([[1]], [2], stop=True))
    assert answer["seconds"] >= 0
    assert (answer["outputs"], answer["drafts"], answer["accepted"]) == ([[7, 7]], 3, 3)


def test_a_missing_token_is_an_error():
    engine = Counting()
    engine.generate = lambda _: [[7]]
    with pytest.raises(AssertionError):
        engine_process.run_batch(engine, Batch([[1]], [2]))

"""Memory comes back: a real model, opened and closed again and again in one program."""

from __future__ import annotations

import pytest
from support.process.harness import run_program

MIB = 1 << 20


def cycles(*, short: int, long: int) -> pytest.MarkDecorator:
    """Run a test with a few cycles, and with many where all tests run."""
    return pytest.mark.parametrize("count", [short, pytest.param(long, marks=pytest.mark.nightly)])


@cycles(short=2, long=10)
def test_more_engines_in_one_process_leave_no_memory(tmp_path, count):
    source = """
        import ctypes, gc, json, weakref
        import psutil, torch
        from support.internals import worker_of
        from hardpoint import LLM, SamplingParams

        weights, opened = [], []

        def cycle():
            with LLM("smollm2", max_model_len=256) as llm:
                llm.generate(["Once", "The sea is"], SamplingParams(temperature=0, max_tokens=4))
                opened.append(resident())
                worker = worker_of(llm.llm_engine)
                model = worker.runner.model
                tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
                largest = max(tensors, key=lambda t: t.numel() if t.device.type == "cpu" else 0)
                assert largest.numel() > 20_000_000, largest.shape
                weights.extend([weakref.ref(model), weakref.ref(largest)])
                del worker, model, tensors, largest
            del llm
            gc.collect()

        def resident():
            return psutil.Process().memory_info().rss

        cycle()
        baseline, seen = resident(), []
        print(json.dumps({"kept": sum(ref() is not None for ref in weights)}))
        for _ in range(COUNT):
            cycle()
            seen.append(resident() - baseline)
        print(json.dumps({"kept": sum(ref() is not None for ref in weights), "grown": seen,
                          "open": opened[-1], "closed": resident()}))
    """
    source = source.replace("COUNT", str(count))
    first, last = run_program(source, folder=tmp_path, forked=True)
    print(f"\n[measured] grown after each cycle, MiB: {[g // MIB for g in last['grown']]}")
    assert first["kept"] == last["kept"] == 0
    assert last["grown"][-1] < 30 * MIB
    assert last["open"] - last["closed"] > 150 * MIB  # the room of the weights, released


@cycles(short=2, long=5)
def test_engine_processes_leave_no_memory_in_their_program(scripted, tmp_path, count):
    source = f"""
        import gc, json
        import psutil
        from hardpoint import LLM, SamplingParams
        from support.process.harness import process_config

        def cycle():
            with LLM(config=process_config({str(scripted)!r})) as llm:
                llm.generate(["say abc"] * 8, SamplingParams(temperature=0, max_tokens=8))
            del llm
            gc.collect()

        cycle()
        baseline = psutil.Process().memory_info().rss
        for _ in range({count}):
            cycle()
        print(json.dumps(psutil.Process().memory_info().rss - baseline))
    """
    (grown,) = run_program(source, folder=tmp_path, forked=True)
    print(f"\n[measured] grown over {count} engine processes: {grown / MIB:.1f} MiB")
    assert grown < 10 * MIB

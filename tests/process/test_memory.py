"""Memory comes back: a real model, opened and closed again and again in one program."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.internals import engine_of, worker_of
from support.parallel import open_llm, parallel_config, write_random_model
from support.process.harness import run_program

from hardpoint import SamplingParams

MIB = 1 << 20


def test_a_closed_engine_leaves_no_weights(tmp_path):
    folder = write_random_model(tmp_path / "model", "LlamaForCausalLM", vocab_size=263)
    with open_llm(parallel_config(model=str(folder), load={"use": "dummy"})) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        model = worker_of(engine_of(llm)).runner.model
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        tensors = [each for each in tensors if 263 in each.shape]
        left = [weakref.ref(each) for each in (model, *tensors)]
    assert tensors
    del llm, model, tensors
    gc.collect()
    assert not any(ref() is not None for ref in left)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 10])
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


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 5])
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

"""Many requests with random ends, and then nothing of them is left in either process."""

from __future__ import annotations

import pytest
from support.process.harness import run_program


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "least"), [(600, 1), (2_000, 21)])
@pytest.mark.parametrize("in_process", [True, False], ids=["in-process", "own-process"])
def test_nothing_is_left_of_many_requests(scripted, tmp_path, in_process, count, least):
    source = f"""
        from support.process.soaking import main

        main({str(scripted)!r}, in_process={in_process}, count={count})
    """
    (found,) = run_program(source, folder=tmp_path, forked=True)
    ends, grown = found["ends"], found["grown"]
    print(f"\n[measured] ends: {ends}")
    print(f"[measured] grown by {grown[0]:.1f} MiB here, {grown[1]:.1f} MiB in the engine")
    assert sum(ends.values()) == count
    assert {"refused", "aborted", "length", "stop", "timeout", "error"} <= set(ends)
    assert min(ends.values()) >= least
    assert max(grown) < 15

"""Surveys the families of transformers: `python -m support.families [--only NAME ...]`.

Writes the results to the data file, of the named architectures alone with `--only`.
Each runs in a process of its own, forked from this one. All take about a minute on a quiet core.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
import warnings
from pathlib import Path

import msgspec
import torch
import transformers

from .data import DATA, read_data, write
from .survey import Family, architectures, survey

_SECONDS = 240
_FIRST = "OPTForCausalLM"


def _in_a_process(name: str) -> Family:
    """Survey an architecture in a forked process; any end of the process is a result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_SECONDS)
        try:
            with tempfile.TemporaryDirectory() as folder:
                family = survey(name, Path(folder))
        except Exception as error:
            family = Family(name, "", "raised", f"{type(error).__name__}: {error}"[:400])
        os.write(writing, msgspec.json.encode(family))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        data = file.read()
    _, status = os.waitpid(child, 0)
    if data:
        return msgspec.json.decode(data, type=Family)
    return Family(name, "", "raised", f"the process ended with status {status}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures")
    only = parser.parse_args().only
    torch.set_num_threads(1)  # forked processes would wait for others, which they have not
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    known = {} if only is None else {family.name: family for family in read_data().families}
    with tempfile.TemporaryDirectory() as folder:
        survey(_FIRST, Path(folder))  # imports all that the processes need
    for name in only or architectures():
        start = time.monotonic()
        surveyed = _in_a_process(name)
        seconds = time.monotonic() - start
        print(
            f"{surveyed.name} ({seconds:.0f} s): {surveyed.path} {surveyed.why} {surveyed.other}",
            flush=True,
        )
        known[name] = surveyed
    write(known.values())
    print(f"written: {DATA}")


main()

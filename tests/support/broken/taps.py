"""Activation taps with one mistake each, and right ones."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import torch

from hardpoint import plugins
from hardpoint.plugins import ActivationTap, TapSite
from support.samples import Sample, leave_file, leave_path, leave_process, leave_thread, spend


class Norms(Sample, ActivationTap, contract=1):
    """Right: the norm of each hidden state."""

    @classmethod
    def sites(cls, arguments):
        return [TapSite(1), TapSite(2, "mlp_output")]

    def read(self, site, values, rows):
        return values.norm(dim=-1)


class Scaled(Sample, ActivationTap, contract=1):
    """Right: hidden states of the answer, multiplied."""

    class Arguments(plugins.Arguments):
        factor: float = 2.0
        layer: int = 0

    @classmethod
    def sites(cls, arguments):
        return [TapSite(arguments.layer, "attention_output")]

    def change(self, site, values, rows):
        factors = torch.where(rows.in_prompt()[:, None], 1.0, rows.tensor("factor"))
        return values * factors


class Exits(Sample, ActivationTap, contract=1):
    """Right: ends the layers of tokens with a large element."""

    class Arguments(plugins.Arguments):
        factor: float = 2.0
        layer: int = 0

    @classmethod
    def sites(cls, arguments):
        return [TapSite(arguments.layer)]

    def exits(self, site, values, rows):
        return values.amax(-1) > rows.tensor("factor").squeeze(1)


class ExitsOrNone(Exits):
    """Right: returns None if no token is of an output."""

    def exits(self, site, values, rows):
        generated = ~rows.in_prompt()
        return super().exits(site, values, rows) & generated if generated.any() else None


class ExitsByNumber(Exits):
    def exits(self, site, values, rows):
        return super().exits(site, values, rows).float()


class ExitsTogether(Exits):
    """Ends the layers of all tokens of a step or of none."""

    def exits(self, site, values, rows):
        return super().exits(site, values, rows).all().expand(len(values))


class ExitsNowhere(Exits):
    def exits(self, site, values, rows):
        return torch.zeros(len(values), dtype=torch.bool)


class ExitsWithOneKey(Exits):
    @classmethod
    def cache_key(cls, arguments):
        return b"exits"


class NoContract(Norms, contract=None):
    pass


class Neither(Norms):
    read = ActivationTap.read


class NoSites(Norms):
    @classmethod
    def sites(cls, arguments):
        return []


class WrongPlace(Norms):
    @classmethod
    def sites(cls, arguments):
        return [TapSite(0, "logits")]


class Sums(Norms):
    def read(self, site, values, rows):
        return values.sum(0)


class Cuts(Scaled):
    def change(self, site, values, rows):
        return values[:, :3]


class Infinite(Scaled):
    def change(self, site, values, rows):
        return values / 0


class Centred(Norms):
    def read(self, site, values, rows):
        return values - values.mean(0)


class Counts(Norms):
    count = 0

    def read(self, site, values, rows):
        self.count += 1
        return values[:, 0] + self.count


class InPlace(Scaled):
    def change(self, site, values, rows):
        return values.mul_(2)


class OneKey(Scaled):
    @classmethod
    def cache_key(cls, arguments):
        return b"scaled"


class TextKey(Scaled):
    @classmethod
    def cache_key(cls, arguments):
        return "scaled"


class Fails(Norms):
    def read(self, site, values, rows):
        raise KeyError("direction")


class KeepsArguments(Scaled):
    """Uses the arguments of the first request for all."""

    first = None

    def change(self, site, values, rows):
        self.first = self.first or rows.arguments[0]
        return values * self.first.factor


class KeepsByLayer(Scaled):
    """Keeps the values of the first request at a site."""

    def __init__(self, context):
        super().__init__(context)
        self.factors = {}

    def change(self, site, values, rows):
        factors = self.factors.setdefault(site, rows.arguments[0].factor)
        return values * factors


class Multiplies(Norms):
    """Multiplies by a matrix; the rounding depends on the number of rows."""

    def __init__(self, context):
        super().__init__(context)
        size = context.hidden_size
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(size, size, generator=generator) / size**0.5

    def read(self, site, values, rows):
        return values @ self.weight


class Adds(Multiplies):
    """Adds a product."""

    read = ActivationTap.read

    def change(self, site, values, rows):
        return values + values @ self.weight


class MultipliesRows(Multiplies):
    """Right: multiplies row by row."""

    def read(self, site, values, rows):
        return torch.stack([row @ self.weight for row in values])


class SortsLayers(Norms):
    """Changes the arguments of a request."""

    class Arguments(plugins.Arguments):
        layers: list[int] = []

    @classmethod
    def sites(cls, arguments):
        return [TapSite(layer) for layer in sorted({0, *arguments.layers})]

    def read(self, site, values, rows):
        rows.arguments[0].layers.append(0)
        return values


class Nothing(Norms):
    def read(self, site, values, rows):
        return None


class Zeros(Norms):
    def read(self, site, values, rows):
        return values[:, 0] * 0


class Identity(Scaled):
    def change(self, site, values, rows):
        return values + 0


class Leaks(Norms):
    """Keeps a number of each call."""

    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def read(self, site, values, rows):
        self.seen.append(float(values[0, 0]))
        return super().read(site, values, rows)


SEEN = []


class LeaksElsewhere(Norms):
    """Keeps hidden states in its module."""

    def read(self, site, values, rows):
        SEEN.append(values[0])
        return super().read(site, values, rows)


class LeaksOneTensor(Norms):
    """Has one tensor that grows."""

    rows = torch.zeros(0, 16)

    def read(self, site, values, rows):
        LeaksOneTensor.rows = torch.cat([self.rows, values[:1]])
        return super().read(site, values, rows)


class KeepsFilesOpen(Norms):
    """Opens a file in each call."""

    def read(self, site, values, rows):
        leave_file()
        return super().read(site, values, rows)


class BeginsThreads(Norms):
    """Begins a thread in each call."""

    def read(self, site, values, rows):
        leave_thread("tap")
        return super().read(site, values, rows)


class LeavesThread(Norms):
    def __init__(self, context):
        super().__init__(context)
        leave_thread("writer")


class LeavesFileOpen(Norms):
    def __init__(self, context):
        super().__init__(context)
        leave_file()


class LeavesTemporaryFile(Norms):
    """Writes a file that stays."""

    def read(self, site, values, rows):
        leave_path(Path(tempfile.gettempdir()) / f"tap-{os.getpid()}.log")
        return super().read(site, values, rows)


class LeavesProcess(Norms):
    def __init__(self, context):
        super().__init__(context)
        leave_process()


class ClosesOnce(Norms):
    def __init__(self, context):
        super().__init__(context)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115

    def close(self):
        self.file.close()
        del self.file


class Spins(Norms):
    """Has a thread that never waits."""

    def __init__(self, context):
        super().__init__(context)
        self.is_closed = False
        self.thread = threading.Thread(target=self.look, name="poller", daemon=True)
        self.thread.start()

    def look(self):
        while not self.is_closed:
            pass

    def close(self):
        self.is_closed = True
        self.thread.join()


class Pins(Norms):
    """Takes a processor for the whole process."""

    def __init__(self, context):
        super().__init__(context)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


class SetsThreads(Norms):
    def read(self, site, values, rows):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return super().read(site, values, rows)


class Seeds(Norms):
    def read(self, site, values, rows):
        torch.manual_seed(len(values))
        return super().read(site, values, rows)


class Sleeps(Norms):
    def read(self, site, values, rows):
        spend(0.3)
        return super().read(site, values, rows)


class Slow(Norms):
    def read(self, site, values, rows):
        spend(0.001)
        return super().read(site, values, rows)

"""Step parts that keep memory of their own for blocks."""

from __future__ import annotations

import torch

from hardpoint.plugins import StepPart, WorkerHalf
from support.samples import Sample


class Keeping(WorkerHalf):
    def __init__(self, change):
        self.change = change

    def cache_allocated(self, cache):
        self.memory_of = [
            torch.zeros(cache.num_blocks, 4, dtype=torch.uint8) for _ in cache.group_of
        ]

    def block_memory(self):
        return self.change(self.memory_of)


class KeepsMemory(Sample, StepPart, contract=1):
    def worker_half(self, context):
        return Keeping(self.change)

    def change(self, memory):
        return memory


class KeepsTooFew(KeepsMemory):
    def change(self, memory):
        return memory[1:]


class KeepsOtherBlocks(KeepsMemory):
    def change(self, memory):
        return [view[1:] for view in memory]


class KeepsIntegers(KeepsMemory):
    def change(self, memory):
        return [view.view(torch.int32) for view in memory]


class KeepsNone(KeepsMemory):
    def change(self, memory):
        return None


class KeepsNothingThen(KeepsMemory):
    def change(self, memory):
        raise ValueError("no memory today")

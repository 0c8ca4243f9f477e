"""A step part that shifts the slots of a step, in whatever process the worker is."""

from __future__ import annotations

from hardpoint.plugins import StepPart, WorkerHalf


class Shifting(WorkerHalf):
    packs = True
    steps = 0

    def around_model(self, forward):
        def run(step):
            self.steps += 1
            if self.steps == 3:
                step.packed.slots[0].add_(1)
            return forward(step)

        return run


class ShiftsSlots(StepPart):
    contract = 1
    after = ("kv_canary",)  # the last one's function is called first

    def worker_half(self, context):
        return Shifting()

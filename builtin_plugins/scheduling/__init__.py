"""The default scheduler: one token budget, running requests first, preemption when blocks run out.

A request has no prefill phase and no decode phase. It has known tokens and computed tokens; each
step hands out a token budget, so that the computed tokens catch up with the known ones.

`scheduler` conducts a step: `running` schedules the running requests, `admission` admits waiting
ones, `step` builds the plan, and `results` processes the model runner's output. `tracker` holds
the state of all live requests and moves them between queues.
"""

from .scheduler import DefaultScheduler

__all__ = ["DefaultScheduler"]

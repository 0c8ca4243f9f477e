"""The default scheduler: one token budget, running requests first, preemption when blocks run out.

There is no prefill and no decode phase. A request has tokens that are known and tokens that are
computed; each step hands out a budget so that the second catch up with the first.

`scheduler` is the conductor. A step goes through `running`, then `admission`, and `step` makes the
plan of it; `outcome` takes the results. `books` knows who is where, and moves requests about.
"""

from .scheduler import DefaultScheduler

__all__ = ["DefaultScheduler"]

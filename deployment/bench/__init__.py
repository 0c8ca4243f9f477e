"""Measurement of a start, by stage: `hardpoint bench startup`."""

from .startup import StartupPlan, measure_startup

__all__ = ["StartupPlan", "measure_startup"]

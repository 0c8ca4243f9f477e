"""Random schedules of an engine: what comes to it from outside, drawn from a seed."""

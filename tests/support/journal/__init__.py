"""Random schedules of an engine: external events, drawn from a seed."""

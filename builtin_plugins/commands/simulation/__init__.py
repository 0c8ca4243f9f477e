"""`hardpoint calibrate` and `hardpoint simulate`: the cost of steps, and simulated requests."""

DEFAULT_FILE = "calibrated.json"
"""Where the cost of steps is written, and read from."""

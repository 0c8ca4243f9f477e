"""`hardpoint calibrate` and `hardpoint simulate`: step times and simulated requests."""

DEFAULT_FILE = "calibrated.json"
"""Where the cost of steps is written, and read from."""

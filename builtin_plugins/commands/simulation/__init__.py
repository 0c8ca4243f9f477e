"""`hardpoint calibrate`, what steps take, and `hardpoint simulate`, what follows for requests."""

DEFAULT_FILE = "calibrated.json"
"""Where the cost of steps is written, and read from."""

"""`hardpoint bench`: the time of a start."""

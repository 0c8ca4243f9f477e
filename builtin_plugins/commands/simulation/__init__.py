"""`hardpoint calibrate`, what steps take, and `hardpoint simulate`, what follows for requests."""

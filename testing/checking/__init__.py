"""`hardpoint plugins check`: the suite of its kind, run on an installed plugin in a child process."""

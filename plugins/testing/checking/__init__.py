"""`hardpoint plugins check`: runs the suite of an installed plugin's kind, in a child process."""

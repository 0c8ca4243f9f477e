"""`hardpoint plugins`: shows and checks plugins."""

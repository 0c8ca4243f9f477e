"""`hardpoint bench`: loads on servers, sweeps of settings, and the time of a start."""

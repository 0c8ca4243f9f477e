"""The suite of step parts: its rules, the sessions that it plays, and the halves in a worker."""

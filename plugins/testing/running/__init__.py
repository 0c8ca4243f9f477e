"""The suites for executors, hooks and commands."""

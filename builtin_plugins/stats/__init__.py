"""Stat sinks: a line in the log, and metrics for Prometheus."""

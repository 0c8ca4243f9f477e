"""The conformance suites of schedulers, scheduling policies and eviction policies."""

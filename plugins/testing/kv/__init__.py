"""Conformance suites for KV connectors and KV stores."""

"""Conformance suites for tokenizers and reasoning parsers."""

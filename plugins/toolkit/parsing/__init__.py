"""Parsers of output formats as tables of states, and JSON text that arrives in pieces."""

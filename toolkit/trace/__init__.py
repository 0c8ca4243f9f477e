"""Traces of requests: what became of each token, as records, a table and a page."""

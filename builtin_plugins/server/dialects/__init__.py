"""Dialects of the API: each reads its own requests and writes its own answers and streams."""

"""Helpers of the tests; plugin modules among them are loaded by engine processes too."""

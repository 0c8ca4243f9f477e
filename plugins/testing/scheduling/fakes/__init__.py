"""Simulated collaborators of a scheduler."""

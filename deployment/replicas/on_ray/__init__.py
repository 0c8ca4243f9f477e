"""Engines in actors of a Ray cluster, each placed by a placement group.

An actor runs the engine's side of `hardpoint.replicas.remote`, which joins the program that has
started it.
"""

"""Engines that share the experts of a model, and so step together: the waves of their steps.

The core of such an engine, which runs in its process, is in `core`; the group's side in `group`.
"""

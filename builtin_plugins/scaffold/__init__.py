"""Packages of plugins for authors: made from templates, and updated to newer ones."""

"""Adapters of components of an earlier contract, old import paths, packages of their own."""

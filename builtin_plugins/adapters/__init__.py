"""Adapter resolvers: a folder."""

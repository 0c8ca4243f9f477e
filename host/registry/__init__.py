"""The loader: discovery, selection, checks, order, and the set of plugins of one engine."""

"""Fails to import."""

1 / 0  # noqa: B018

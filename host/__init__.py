"""The plugin host: how plugins are found, guarded and changed, and what processes share."""

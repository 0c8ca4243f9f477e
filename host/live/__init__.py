"""Changes of plugins and settings while the engine runs: prepared, then committed or undone."""

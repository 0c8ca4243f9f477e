"""The suites for models: attention backends, models and weight loaders."""

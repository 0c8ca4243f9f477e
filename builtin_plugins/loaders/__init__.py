"""Weight loaders, one per format."""

"""Rules of weight loaders about changed checkpoints."""

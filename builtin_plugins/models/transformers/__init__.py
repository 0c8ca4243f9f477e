"""Models of architectures that have no plugin of their own, computed by modules of transformers."""

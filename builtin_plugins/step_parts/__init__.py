"""Features of the engine's step, each a step part, with imports open to every author."""

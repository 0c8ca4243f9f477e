"""Input processing: from callers' prompts to checked requests of the engine."""

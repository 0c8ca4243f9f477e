"""Between the user and the engine: checks and tokenizes requests, detokenizes outputs."""

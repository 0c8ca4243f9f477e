"""Between the user and the engine: checks and tokenises requests, detokenises outputs."""

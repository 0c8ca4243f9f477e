"""Routes that pool: vectors, scores, classes and the inputs of IO processors."""

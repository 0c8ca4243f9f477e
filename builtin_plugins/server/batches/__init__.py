"""OpenAI's batch files: their lines, and the answers to them."""

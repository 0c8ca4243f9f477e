"""Old names that work until 0.3: members of `LLM` and `AsyncLLM`, modules of the contract."""

"""Groups of members of LLM and AsyncLLM, and the requests of their calls."""

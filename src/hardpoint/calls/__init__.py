"""Calls of LLM and AsyncLLM by what they are about; bases of these classes."""

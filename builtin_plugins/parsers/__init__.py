"""Output parsers of the families that people run: reasoning, tool calls, or both."""

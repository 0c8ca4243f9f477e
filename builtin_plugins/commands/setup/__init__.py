"""Commands for the setup: a checked configuration, a first file, and facts for a bug report."""

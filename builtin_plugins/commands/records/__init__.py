"""Commands for records of an engine: journals and traces."""

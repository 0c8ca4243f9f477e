"""Commands on the records of an engine: journals and traces."""

"""Commands on what an engine has recorded: journals and traces."""

"""Worker processes of a command, each with a frontend of its own for the same engines."""

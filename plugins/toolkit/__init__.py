"""Libraries for plugin authors: parsers of output formats, layers of models, calls of workers."""

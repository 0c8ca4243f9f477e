"""The configuration of a program, from files, environment and arguments; the catalog of plugins."""

"""The client of an engine process: its sockets, and the outputs that wait to be read."""

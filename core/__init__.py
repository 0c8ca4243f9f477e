"""The engine: moves requests and tokens; owns memory, processes and time."""

"""The engine core: its steps, its control calls, and how it is built."""

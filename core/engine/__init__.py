"""The engine core: one step, its control calls, and how it is built."""

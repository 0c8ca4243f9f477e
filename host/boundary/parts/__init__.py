"""Step parts as the engine and its workers call them: bound to lists, checked, blamed."""

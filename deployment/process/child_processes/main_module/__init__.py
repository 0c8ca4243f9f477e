"""Pickling of classes that the user defined in `__main__`."""

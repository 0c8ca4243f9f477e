"""An attention backend from a third party."""

"""Python processes like this one: how they are started, watched and ended."""

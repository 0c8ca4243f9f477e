"""Every built-in feature, written against hardpoint.plugins alone."""

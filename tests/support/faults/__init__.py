"""Messages to users about simple faults of plugins: (kind, method, misbehaviour) -> messages."""

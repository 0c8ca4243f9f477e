"""What users see of each simple fault of a plugin: (kind, method, misbehaviour) -> messages."""

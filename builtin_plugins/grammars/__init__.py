"""Grammar backends."""

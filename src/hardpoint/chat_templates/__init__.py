"""Chat templates: which one a conversation has, and what it renders."""

"""How a frontend reaches an engine core: in this process, or in one of its own."""

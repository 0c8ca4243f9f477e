"""KV stores."""

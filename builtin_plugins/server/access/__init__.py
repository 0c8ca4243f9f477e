"""Who may use the server: hosts and origins, keys, TLS."""

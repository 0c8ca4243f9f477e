"""Who may use the server, and how much: hosts and origins, keys, counts, TLS."""

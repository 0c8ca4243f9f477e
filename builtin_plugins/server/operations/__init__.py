"""What operators see of a server: its addresses, its connections, its log and its figures."""

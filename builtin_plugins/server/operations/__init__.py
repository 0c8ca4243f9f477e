"""The operator's view of a server: its addresses, its connections, its log and its figures."""

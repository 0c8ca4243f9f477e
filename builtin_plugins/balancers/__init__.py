"""Load balancers: which of several engines runs a request."""

"""`/v1/responses`: its body, its answers, and the responses that are stored."""

"""A light load generator for servers that speak OpenAI's API; used by serve.py and soak.py."""

"""The causal families of transformers, each with a tiny random model: which run, and how."""

"""A model family from a third party: a small GPT, its file format and its byte tokenizer."""

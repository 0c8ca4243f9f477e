"""Models of the Hugging Face hub in the cache: download, list, remove."""

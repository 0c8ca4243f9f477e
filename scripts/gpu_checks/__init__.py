"""Parts of scripts/gpu-check: its checks on a GPU, and its page."""

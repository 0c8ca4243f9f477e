"""Parts of scripts/gpu-check: what it checks on a GPU, and the page that it writes."""

"""Native models, their layers and the reading of Hugging Face configs."""

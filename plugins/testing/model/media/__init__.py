"""The rules and checks for models with images in their prompts."""

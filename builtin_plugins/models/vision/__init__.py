"""Parts that vision-language models share."""

"""OpenAI's files and batches over HTTP, as a plugin of kind `hooks`: off without a folder."""

from .plugin import BatchRoutes

__all__ = ["BatchRoutes"]

"""The routes of the API, one module for each family."""

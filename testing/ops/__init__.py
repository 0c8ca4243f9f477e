"""The suite for operations."""

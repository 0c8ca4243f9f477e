"""A KV connector that keeps blocks as files, and loads them layer by layer."""

from .connector import LayeredFiles as LayeredFiles

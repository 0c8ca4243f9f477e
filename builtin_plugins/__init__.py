"""The built-in plugins; they import hardpoint.plugins and nothing else of the package."""

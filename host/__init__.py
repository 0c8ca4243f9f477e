"""The plugin host: discovery, guards and hot reconfiguration of plugins, and process utilities."""

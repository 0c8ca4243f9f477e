"""The conformance kit and the scripted model, for tests of plugins and of the engine."""

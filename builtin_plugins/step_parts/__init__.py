"""Features of the engine's step, each a step part; they import what every author may."""

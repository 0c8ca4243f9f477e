"""Child processes of engines and workers: launch, naming, and the objects that reach them."""

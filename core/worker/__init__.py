"""On the device: the persistent batch, the model runner and the worker around them."""

"""The worker of a device: the persistent batch, the model runner and sampling."""

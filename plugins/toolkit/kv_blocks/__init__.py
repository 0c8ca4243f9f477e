"""The start of step parts that move KV blocks: hash of the weights, identity of the blocks."""

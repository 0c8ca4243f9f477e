"""Steps whose operations are recorded, and repeated without running Python."""

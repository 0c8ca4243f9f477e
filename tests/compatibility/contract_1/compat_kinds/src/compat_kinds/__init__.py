"""A plugin of each kind that no example package has, as written for contract 1.

The wheel beside this folder was built from it once and is not built again: a later version of the
engine that accepts contract 1 has to run it as it is.
"""

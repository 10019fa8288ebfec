"""Checks for users: reversibility, gradients and memory of a chain.

Every check runs the caller's own chain and leaves it unchanged: weights, gradients, buffers, random
state. It returns numbers that print as a table, and raises an error that names the unit or
parameter where something is wrong.
"""

"""Ops on paged KV caches, one package per op.

``__init__`` holds an op's contract and checks, ``reference`` the float64 definition that tests
compare with, ``cpu`` the torch code for a CPU, and ``triton`` the kernels for a GPU.
"""

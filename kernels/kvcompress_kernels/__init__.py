"""Ops on paged KV caches: a folder for each, named as the op.

Its ``__init__`` holds the contract and the checks, ``reference`` the definition that tests compare
with, ``cpu`` the torch code that runs on a CPU, and ``triton`` the kernels that run on a GPU.
"""

"""Ops on paged KV caches: a folder for each, named as the op.

Its ``__init__`` holds the contract and the checks, ``reference`` the torch code that defines it,
and ``triton`` the kernels that run where the tensors lie on a GPU.
"""

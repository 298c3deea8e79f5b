"""Compression on a worker: observe the layers, score tokens, select them, and pack them."""

"""Compression on a worker: score a prompt's tokens, select them, and pack them into pages."""

"""Measure how compression changes a model's outputs, on your own prompts or on built-in tasks.

The benchmarks use the same `tasks`, `measures`, `statistics`, `tables` and `figures`.
"""

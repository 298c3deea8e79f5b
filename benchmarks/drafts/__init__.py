"""Acceptance length of a trained EAGLE head, with vLLM alone and with compression.

* `train`: trains a head on the model's own greedy outputs.
* `python -m benchmarks.drafts`: measures the acceptance length with that head.
"""

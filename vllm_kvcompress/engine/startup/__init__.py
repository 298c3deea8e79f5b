"""Run once before a model loads: add flags, refuse unsupported options, select our classes."""

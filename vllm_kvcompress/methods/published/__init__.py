"""Methods, one file each, from the paper's formulas to the preset.

Each file has the parts that its paper adds (allocator, scorer or selector), the parameters that the
paper publishes per model, and last the `Preset` that combines the parts. `registry` names them all.
"""

"""``kvcompress plan``: forecast the memory and the concurrency of a model on a GPU.

`command` makes a forecast in four steps. `model_shape` reads the layers and heads from the model's
config.json. `weights` and `gpu_memory` estimate the memory that is left for the KV cache.
`concurrency` counts the blocks of one request with the scheduler's own packing schedules, and how
many requests fit; its results are the classes of `forecast`. `report` prints them. `options`
declares the command's flags.
"""

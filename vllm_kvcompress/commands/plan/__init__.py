"""``kvcompress plan``: forecast the memory and the concurrency of a model on a GPU.

`command` turns the options into one result, `forecast.PlanResult`:

1. `model_shape` reads the layers and heads from the model's config.json. `weights` and
   `gpu_memory` estimate the memory that is left for the KV cache.
2. `concurrency` plans one request (`planning.request`), counts its blocks, and computes how many
   requests fit. `next_turn` computes what stays in the prefix cache between the turns of a chat.

`report` prints the result. `options` declares the command's flags.
"""

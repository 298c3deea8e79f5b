"""One run for any CUDA GPU: ``python -m benchmarks.gpu --out DIR``.

* correctness: the kernels' tests on this GPU (``pytest -m gpu``)
* kernels: every op as the engine launches it, against its floor on this GPU
* tokens: vLLM with the plugin and without, the same tokens wherever nothing is dropped
* serving: time to the first token, decode steps and requests that one KV pool holds
"""

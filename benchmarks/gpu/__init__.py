"""Benchmarks for one CUDA GPU: ``python -m benchmarks.gpu --out DIR``.

* correctness: the kernel tests on this GPU (``pytest -m gpu``)
* kernels: time of every op as the engine launches it, against its floor on this GPU
* tokens: vLLM with and without the plugin must give the same tokens wherever nothing is dropped
* serving: time to first token, decode step time, and number of requests that one KV pool holds
"""

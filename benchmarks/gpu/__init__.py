"""Benchmarks for one CUDA GPU: ``python -m benchmarks.gpu [STAGE ...] --out DIR``.

* packed-attention: attention over k4v3 pages against its reference, 16 bits, fp8 and TurboQuant
* correctness: the kernel tests on this GPU (``pytest -m gpu``)
* window-scores, kernels: times of ops as the engine launches them, against their floors on this GPU
* tokens: vLLM with and without the plugin must give the same tokens wherever nothing is dropped
* switches, long, gaps, idle, batches: engines that take turns (`serving.py`)
* server: HTTP servers that take turns, with ``vllm bench serve``
"""

"""Output quality of methods and budgets on one prefilled prompt.

A transformers model with our own attention computes the prompt once on the full cache.
`vllm_kvcompress.methods` then compresses that cache for each method and budget as the engine does,
and all compressed caches decode as one batch. A hundred combinations of method and budget cost
little more than one prefill; an engine would run each of them separately.
"""

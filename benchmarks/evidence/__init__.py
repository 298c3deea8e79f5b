"""What answers keep under every method and budget: one prefill of a prompt, then all of them.

A model of transformers in this process, whose attention is ours: the prompt is computed once on the
full cache, `vllm_kvcompress.methods` chooses and packs for each method and budget as the engine
does, and all of them answer as rows of one batch. So a hundred combinations cost little more than a
prefill, where an engine would compute, score and pack each alone.
"""

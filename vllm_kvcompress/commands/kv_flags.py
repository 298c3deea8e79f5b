"""Metavar and help of the flags of ``vllm serve`` that our commands take.

``make reference`` writes this file, so that commands start without importing settings and torch.
"""

from collections.abc import Mapping

KV_FLAGS: Mapping[str, tuple[str, str]] = {
    "compress": (
        "METHOD",
        "After the prefill or the look-ahead, compress the KV cache of long prompts with this"
        " method: off, snapkv, pyramidkv, h2o, tova, streamingllm, cake, dynamickv, d2o, chunkkv,"
        " caote, fastcaote, defensivekv, layer-defensivekv, keydiff, lagkv, cake-chunk, random,"
        " custom.",
    ),
    "budget": (
        "BUDGET",
        "How much of each prompt to keep, the observation window included: a ratio in (0, 1], or"
        " a whole number of tokens per layer.",
    ),
    "packed_dtype": (
        "FORMAT",
        "Format of kept tokens. auto: the KV cache's dtype. k4v3: 4-bit keys and 3-bit values,"
        " which hold 4 times as many tokens in the same memory as 16 bits.",
    ),
    "reuse": (
        "WHEN",
        "Keep packed pages in the prefix cache, so that later turns of a chat find them: off,"
        " grid or late. It needs k4v3 at a budget of 1.0.",
    ),
    "window": (
        "TOKENS",
        "Observation window: the last prompt tokens, which are always kept and whose queries"
        " score the others.",
    ),
    "lookahead": (
        "TOKENS",
        "Compression waits for this many output tokens, whose queries then score the prompt. 0"
        " compresses when the prefill ends.",
    ),
    "min_prompt": (
        "TOKENS",
        "Prompts with fewer tokens stay uncompressed. With --kv-reuse, the default is 0.",
    ),
    "decode_budget": (
        "TOKENS",
        "Tokens per layer that a request may hold while it generates. With none, the KV cache of"
        " the output grows.",
    ),
    "decode_interval": (
        "TOKENS",
        "Output tokens between two compressions to --kv-decode-budget: a multiple of the KV"
        " block. With --kv-packed-dtype k4v3 and no decode budget: output tokens between two"
        " packings of the output in k4v3. No token is dropped, and the number is rounded up to"
        " whole packed pages.",
    ),
    "max_whole": (
        "TOKENS",
        "Prompts with more tokens are compressed piece by piece during prefill, and may be longer"
        " than the KV pool. With none, every prompt is compressed after its prefill.",
    ),
    "piece": (
        "TOKENS",
        "Tokens of a prompt longer than --kv-max-whole between two compressions: a multiple of"
        " the KV block.",
    ),
    "probe": (
        "TOKENS",
        "The last tokens of a prompt longer than --kv-max-whole, whose queries score each of its"
        " pieces. With 0, each piece's last tokens score it.",
    ),
    "probe_first": (
        "TOKENS",
        "The first tokens of a prompt longer than --kv-max-whole, whose queries also score each"
        " piece. Set it high enough to include an instruction that comes before the text.",
    ),
    "park": (
        "GIB",
        "GiB of host memory for the pages of preempted compressed requests, which then resume"
        " without being computed again.",
    ),
    "allow_override": (
        "METHODS",
        "Methods that requests may choose in vllm_xargs.kv_compress: all, or a list separated by"
        " commas.",
    ),
    "budget_bounds": (
        "MIN:MAX",
        "Smallest and largest budget that requests may choose in vllm_xargs.kv_budget, for"
        " example 0.05:0.5 or 256:4096, or one range of each kind separated by a comma.",
    ),
    "alias": (
        "NAME=METHOD:BUDGET",
        "Another model name, whose requests use this method and budget. NAME=METHOD:BUDGET:k4v3"
        " also sets --kv-packed-dtype. NAME=off compresses nothing. May be repeated.",
    ),
    "compress_config": (
        "JSON",
        "Any settings and method parameters, as a JSON object. The flags above win over it.",
    ),
}

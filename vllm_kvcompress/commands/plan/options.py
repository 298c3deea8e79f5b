"""Command-line options of ``kvcompress plan``."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vllm_kvcompress.commands.options import AS_JSON, settings_from


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of ``kvcompress plan``. Each option's help describes it. Memory is in GiB."""

    model: Annotated[str, typer.Argument(help="Model folder or Hugging Face model name.")]
    length: Annotated[int, typer.Option("--len", min=1, help="Prompt length in tokens.")]
    output: Annotated[int, typer.Option("--max-tokens", min=1, help="Output tokens.")] = 256
    compress: str | None = None
    budget: str | None = None
    packed_dtype: str | None = None
    reuse: str | None = None
    window: int | None = None
    lookahead: int | None = None
    protected: Annotated[
        int,
        typer.Option(
            "--protected",
            metavar="TOKENS",
            min=0,
            help="Prompt tokens that --kv-protect protects.",
        ),
    ] = 0
    min_prompt: int | None = None
    compress_config: str | None = None
    allow_override: str | None = None
    budget_bounds: str | None = None
    alias: list[str] | None = None
    decode_budget: str | None = None
    decode_interval: int | None = None
    max_whole: str | None = None
    piece: int | None = None
    probe: int | None = None
    probe_first: int | None = None
    park: str | None = None
    memory_gib: Annotated[
        float | None,
        typer.Option(
            "--kv-memory",
            metavar="GIB",
            min=0,
            help="KV cache of one GPU in GiB. vLLM logs it as available KV cache memory.",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size",
            min=1,
            help="Tokens per KV block. Default: 16 on CUDA, 128 on a CPU, and 32 there with k4v3.",
        ),
    ] = None
    dtype: Annotated[
        str, typer.Option("--dtype", help="Dtype of the model. auto uses its config's dtype.")
    ] = "auto"
    ranks: Annotated[
        int, typer.Option("--tp", "--tensor-parallel-size", min=1, help="Tensor-parallel size.")
    ] = 1
    stages: Annotated[
        int, typer.Option("--pp", "--pipeline-parallel-size", min=1, help="Pipeline-parallel size.")
    ] = 1
    longest: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            min=1,
            help="Maximum tokens of a prompt and its output together. Sets the size of the page"
            " tables.",
        ),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            "--max-num-seqs",
            min=1,
            help="Maximum concurrent requests. Default: vLLM's for the device.",
        ),
    ] = None
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory",
            metavar="GIB",
            min=0,
            help="All memory of one GPU in GiB. Selects vLLM's defaults, and without --kv-memory"
            " estimates the KV cache.",
        ),
    ] = None
    utilization: Annotated[
        float,
        typer.Option("--gpu-memory-utilization", help="Share of the GPU's memory that vLLM uses."),
    ] = 0.92
    cache_dtype: Annotated[
        str,
        typer.Option(
            "--kv-cache-dtype", help="Dtype of the KV cache. auto uses the model's dtype."
        ),
    ] = "auto"
    state_dtype: Annotated[
        str,
        typer.Option(
            "--mamba-ssm-cache-dtype",
            help="Dtype of recurrent states. auto uses vLLM's choice for the model.",
        ),
    ] = "auto"
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="With prefix caching, each state takes two blocks per request instead of one."
            " Default: on, unless the model does not support it.",
        ),
    ] = None
    speculative: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            "-sc",
            metavar="JSON",
            help="Drafts, in vLLM's JSON. The layers of a draft model keep all tokens.",
        ),
    ] = None
    disable_sliding_window: Annotated[
        bool,
        typer.Option(
            "--disable-sliding-window",
            help="Limit requests to the sliding window's length, as in vLLM.",
        ),
    ] = False
    device: Annotated[str, typer.Option("--device", help="cuda or cpu.")] = "cuda"
    as_json: Annotated[bool, AS_JSON] = False

    @property
    def settings(self) -> dict[str, Any]:
        """Return the compression settings that were given, by their keys in `CompressionConfig`.

        Raises:
            ConfigError: ``--kv-compress-config`` is not a JSON object.
        """
        return settings_from(self)

"""The options of ``kvcompress plan``, as they are typed."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vllm_kvcompress.commands import kv_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What was typed. Each option's help says what it is; memory is in GiB."""

    model: Annotated[str, typer.Argument(help="A model's folder, or its name on the hub.")]
    length: Annotated[int, typer.Option("--len", min=1, help="Tokens of a prompt.")]
    output: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of an answer.")] = 256
    compress: kv_flags.Compress = None
    budget: kv_flags.Budget = None
    window: kv_flags.Window = None
    lookahead: kv_flags.Lookahead = None
    protected: Annotated[
        int,
        typer.Option(
            "--protected",
            metavar="TOKENS",
            min=0,
            help="Tokens of the prompt that are protected, by --kv-protect.",
        ),
    ] = 0
    min_prompt: kv_flags.MinPrompt = None
    everything: kv_flags.Everything = None
    allow_override: kv_flags.AllowOverride = None
    budget_bounds: kv_flags.BudgetBounds = None
    alias: kv_flags.Aliases = None
    decode_budget: kv_flags.DecodeBudget = None
    max_whole: kv_flags.MaxWhole = None
    piece: kv_flags.Piece = None
    probe: kv_flags.Probe = None
    probe_first: kv_flags.ProbeFirst = None
    memory_gib: Annotated[
        float | None,
        typer.Option(
            "--kv-memory",
            metavar="GIB",
            min=0,
            help="The KV cache of one GPU, in GiB: vLLM logs it as available KV cache memory.",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size",
            min=1,
            help="Tokens in a block; vLLM's own is 16 on CUDA and 128 on a CPU.",
        ),
    ] = None
    dtype: Annotated[
        str, typer.Option("--dtype", help="What the model computes in; auto: its config's dtype.")
    ] = "auto"
    ranks: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size.")] = 1
    stages: Annotated[int, typer.Option("--pp", min=1, help="Pipeline-parallel size.")] = 1
    longest: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            min=1,
            help="Tokens that a prompt and its answer may have together: the width of the tables.",
        ),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            "--max-num-seqs",
            min=1,
            help="Requests at once; vLLM's own default for the device where it is not given.",
        ),
    ] = None
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory",
            metavar="GIB",
            min=0,
            help="All memory of one GPU, in GiB: decides vLLM's defaults, and estimates the KV"
            " cache where --kv-memory is not given.",
        ),
    ] = None
    utilization: Annotated[
        float,
        typer.Option(
            "--gpu-memory-utilization", help="Share of the GPU's memory that vLLM may take."
        ),
    ] = 0.92
    cache_dtype: Annotated[
        str,
        typer.Option(
            "--kv-cache-dtype", help="What keys and values are stored in; auto: the model's dtype."
        ),
    ] = "auto"
    state_dtype: Annotated[
        str,
        typer.Option(
            "--mamba-ssm-cache-dtype",
            help="What layers that keep a state sum in; auto: what vLLM takes for the model.",
        ),
    ] = "auto"
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Without it a state takes one block of a request, and with it two. If neither is"
            " given, it is on unless the model cannot be served so.",
        ),
    ] = None
    disable_sliding_window: Annotated[
        bool,
        typer.Option(
            "--disable-sliding-window", help="Serve no more tokens than the sliding window has."
        ),
    ] = False
    device: Annotated[str, typer.Option("--device", help="cuda or cpu.")] = "cuda"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of compression that were typed, by their keys in `CompressionConfig`.

        Raises:
            ConfigError: ``--kv-compress-config`` is no JSON object.
        """
        return kv_flags.settings_from(
            self.everything,
            compress=self.compress,
            budget=self.budget,
            window=self.window,
            lookahead=self.lookahead,
            min_prompt=self.min_prompt,
            allow_override=self.allow_override,
            budget_bounds=self.budget_bounds,
            alias=self.alias,
            decode_budget=self.decode_budget,
            max_whole=self.max_whole,
            piece=self.piece,
            probe=self.probe,
            probe_first=self.probe_first,
        )

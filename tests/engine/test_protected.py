"""Protected spans on the real engine: kept tokens compared with float64 references.

The reference sees the queries, keys and values that the attention layers received.
"""

import pytest
import torch

from checkpoints import SHAPES, make, tokens
from engines import BLOCK, engine, settings
from recordings import recorded
from test_decode_budgets import INTERVAL, METHODS, Replay
from test_lookahead import (
    BUDGET,
    LOOKAHEAD,
    LookaheadPieceReplay,
    LookaheadReplay,
    lookahead_config,
)
from test_prompts_in_pieces import CHUNKED_PREFILL, PIECE, PieceReplay, pieces_settings
from vllm_kvcompress.settings.protection import parse_protect

NAME = "llama-gqa"
# at the beginning, in the middle, and overlapping the window and the tail
SPANS = ["0:20", "95:131", "300:301", "390:411"]


def protected(spans):
    _, pairs = parse_protect("spans", spans)
    return frozenset(at for start, stop in pairs for at in range(start, stop))


def record(folder, config, prompt, answer, spans, **options):
    """Return the attention inputs of one request, and its compressions up to the prompt's end."""
    options = {**CHUNKED_PREFILL, **options}
    run = recorded(make(NAME, folder), config, prompt, answer, {"kv_protect": spans}, **options)
    return run.seen, run.packed


class AtEnd(PieceReplay):
    """Reference for a prompt that is compressed after its prefill."""

    def __init__(self, method, shape, seen, prompt, budget, window) -> None:
        super().__init__(method, shape, seen, prompt, budget)
        self.w = window
        self.held = [[list(range(prompt)) for _ in range(shape.kv_heads)] for _ in self.held]


@pytest.mark.parametrize("method", METHODS)
def test_compression_after_prefill_keeps_protected_spans(method, checkpoints_folder):
    length, answer, budget = 417, 12, 0.5
    window = {"tova": 1, "streamingllm": 0}.get(method, 32)
    config = settings(method, budget, **({} if window < 2 else {"window": window}))
    prompt = tokens(length, seed=33)
    seen, (pack_request,) = record(checkpoints_folder, config, prompt, answer, SPANS)
    plan = pack_request.plan
    assert not plan.raised
    assert sum(stop - start for start, stop in plan.spans) == len(protected(SPANS)) == 78
    replay = AtEnd(method, SHAPES[NAME], seen, length, int(length * budget), window)
    replay.protected = protected(SPANS)
    replay.after(length)
    assert all(replay.protected <= set(own) for heads in replay.held for own in heads)
    for position in range(length, length + answer - 1):
        replay.look(position)


CASES = [("snapkv", None), ("cake", None), ("cake-chunk", None), ("caote", None), ("cake", 40)]


@pytest.mark.parametrize(("method", "window"), CASES)
def test_compression_after_a_lookahead_keeps_protected_spans(method, window, checkpoints_folder):
    length, answer, spans = 417, LOOKAHEAD + 20, ["0:20", "100:103", "405:417"]
    extra_args = {} if window is None else {"window": window}
    config = lookahead_config(method, lookahead=LOOKAHEAD, **extra_args)
    seen, _ = record(checkpoints_folder, config, tokens(length, seed=33), answer, spans)
    replay = LookaheadReplay(
        method, SHAPES[NAME], seen, length, LOOKAHEAD, window=window
    ).start_after_prefill()
    replay.protected = protected(spans)
    replay.steps(length, length + answer - 1)
    assert replay.packed_at == [length + LOOKAHEAD]


@pytest.mark.parametrize("lookahead", [0, LOOKAHEAD])
@pytest.mark.parametrize("method", ["cake", "snapkv", "cake-chunk"])
def test_unprotected_tokens_keep_their_full_share_with_operator_protection(
    method, lookahead, checkpoints_folder
):
    """0.3 keeps 125 of 417 tokens. 57 are protected in pages, and 108 of the other 360 are kept."""
    # with other seeds, two CAKE scores at the cut-off differ by less than float32's precision
    length, answer = 417, LOOKAHEAD + 20
    config = settings(
        method, 0.3, window=32, protect="system", lookahead=lookahead, allow_override=method
    )
    seen, (pack_request,) = record(
        checkpoints_folder, config, tokens(length, seed=35), answer, SPANS
    )
    plan, layers = pack_request.plan, SHAPES[NAME].layers
    computed = length + lookahead
    shared = -(-(125 + lookahead) * (computed - plan.protected_in_pages) // computed)
    assert plan.protected_in_pages == (64 if lookahead else 57)
    assert plan.raised
    assert plan.pages == layers * -(-(plan.protected_in_pages + shared - computed % BLOCK) // BLOCK)
    if lookahead:
        replay = LookaheadReplay(
            method, SHAPES[NAME], seen, length, LOOKAHEAD, window=32
        ).start_after_prefill()
        replay.budget = plan.budget - LOOKAHEAD
    else:
        replay = AtEnd(method, SHAPES[NAME], seen, length, plan.budget, 32)
    replay.protected = protected(SPANS)
    if not lookahead:
        replay.after(length)
    for position in range(length, length + answer - 1):
        replay.step(position) if lookahead else replay.look(position)
    assert replay.packed_at == [computed]


@pytest.mark.parametrize("method", ["snapkv", "cake", "streamingllm", "cake-chunk", "tova"])
def test_later_pieces_keep_the_spans_of_earlier_pieces(method, checkpoints_folder):
    """Spans cross a boundary and include the last piece, whose end is kept anyway."""
    length, answer, spans = 531, 20, ["2:12", "90:101", "200:201", "500:520"]
    config = pieces_settings(method, 0.4, probe=0)
    seen, _ = record(checkpoints_folder, config, tokens(length, seed=5), answer, spans)
    replay = PieceReplay(method, SHAPES[NAME], seen, length, int(length * 0.4))
    replay.protected = protected(spans)
    replay.replay_all(length + answer)
    assert len(replay.packed_at) >= 3
    assert all(replay.protected <= set(own) for heads in replay.held for own in heads)


@pytest.mark.parametrize("method", ["cake", "snapkv", "cake-chunk"])
def test_spans_are_kept_through_pieces_lookahead_and_decode_budget(method, checkpoints_folder):
    """Scored by the prompt's ends, then by the output, then at every decode interval."""
    length, bound, answer, spans = 535, 192, 120, ["0:18", "120:150", "470:490"]
    probe = {"probe_first": 10, "probe": 14}
    config = lookahead_config(
        method,
        BUDGET,
        LOOKAHEAD,
        **{"max_whole": 384, "piece": PIECE, "window": 8, **probe},
        decode_budget=bound,
        decode_interval=INTERVAL,
    )
    # with seed 6, the scores of two tokens at cake's cut-off differ by a relative 5e-9
    prompt, options = tokens(length, seed=8), {"blocks": 1 + 384 // BLOCK, "max_model_len": 656}
    seen, _ = record(checkpoints_folder, config, prompt, answer, spans, **options)
    replay = LookaheadPieceReplay(
        method, SHAPES[NAME], seen, length, LOOKAHEAD, window=8, bound=bound
    )
    replay.last, replay.max_tokens_before_end = length + answer, 384 - PIECE - 32
    replay.protected = protected(spans)
    replay.steps(0, length + answer - 1)
    at = replay.packed_at.index(length + LOOKAHEAD)
    assert at >= 3, "pieces"
    assert len(replay.packed_at) >= at + 3, "intervals"
    assert all(replay.protected <= set(own) for heads in replay.held for own in heads)


@pytest.mark.parametrize("method", ["cake", "streamingllm", "chunkkv"])
def test_a_decode_budget_keeps_the_spans_of_a_short_prompt(method, checkpoints_folder):
    """The prompt stayed uncompressed until then."""
    prompt, answer, spans = 45, 150, ["0:6", "20:31"]
    config = settings(method, decode_budget=64, decode_interval=INTERVAL)
    seen, _ = record(checkpoints_folder, config, tokens(prompt, seed=5), answer, spans)
    replay = Replay(method, SHAPES[NAME], seen)
    replay.protected = protected(spans)
    replay.steps(prompt, prompt + answer - 1)
    assert len(replay.packed_at) >= 3


@pytest.mark.parametrize(
    ("more", "extra_args", "message"),
    [
        ({}, {"kv_protect": "0:200"}, "need a budget of 312 tokens .* may have 180"),
        ({"allow_override": "all", "budget_bounds": "0.1:0.4"}, {"kv_protect": "0:290"},
         "need a budget of 408 tokens .* may have 240"),
        ({"decode_budget": 64, "decode_interval": 32}, {"kv_protect": "0:60"},
         "need a decode budget of 96 tokens .* may have 64"),
        ({"allow_override": "snapkv", "max_whole": 256, "piece": 96, "probe": 0},
         {"kv_protect": "0:200"}, "every layer keeps 192 tokens between the pieces"),
        # the end of the prompt counts too, not only the tokens kept before it
        ({"max_whole": 512, "piece": 96, "probe": 0}, {"kv_protect": "0:200"},
         "need a budget of 312 tokens .* may have 180"),
        ({}, {"kv_protect": ",".join(f"{at}:{at + 1}" for at in range(0, 80, 2))},
         "at most 32 separate spans, got 40"),
        ({}, {"kv_protect": "0:601"}, r"within the prompt's 600 tokens, got \[0, 601\]"),
        ({}, {"kv_protect": "system"}, "because this request is not a chat"),
    ],
)  # fmt: skip
def test_forbidden_protection_is_refused(more, extra_args, message, checkpoints_folder):
    from vllm.exceptions import VLLMValidationError

    config, prompt = settings("snapkv", 0.3, **more), tokens(600, seed=3)
    with engine(make(NAME, checkpoints_folder), additional_config=config, **CHUNKED_PREFILL) as llm:
        with pytest.raises(VLLMValidationError, match=message):
            llm.generate([prompt], 8, extra_args=extra_args)
        assert not llm.scheduler.requests
        if "decode_budget" in more:
            return
        # a prompt that stays uncompressed needs no check
        assert len(llm.generate([prompt[:100]], 8, extra_args={"kv_protect": "0:90"})[0]) == 8


def test_a_mostly_protected_prompt_is_compressed_by_the_decode_budget(checkpoints_folder):
    """The prompt stays uncompressed until the output has grown past the decode budget."""
    prompt, answer, spans = 150, 150, ["3:90"]
    config = settings("cake", allow_override="cake", decode_budget=128, decode_interval=INTERVAL)
    # with seed 5, the rounding error of an output is slightly above the bound
    seen, packed = record(checkpoints_folder, config, tokens(prompt, seed=6), answer, spans)
    assert packed == []
    replay = Replay("cake", SHAPES[NAME], seen, prompt, 128, answer)
    replay.protected = protected(spans)
    replay.steps(prompt, prompt + answer - 1)
    assert len(replay.packed_at) >= 2


@pytest.mark.parametrize("probe", [8, 20])
def test_a_probe_shorter_than_the_window_keeps_the_window(probe, checkpoints_folder):
    """The question crosses the last boundary, and the prompt ends right after it."""
    method, length, answer, spans = "snapkv", 4 * PIECE + 12, 20, ["2:12", f"{4 * PIECE - 20}:390"]
    more = {"max_whole": 300, "piece": PIECE, "probe": probe, "window": 16}
    config = settings(method, 0.4, **more)
    seen, _ = record(checkpoints_folder, config, tokens(length, seed=5), answer, spans)
    if probe < 16:
        replay = PieceReplay(method, SHAPES[NAME], seen, length, int(length * 0.4))
        replay.w, replay.max_tokens_before_end = 16, (300 - PIECE - BLOCK) // BLOCK * BLOCK
        replay.protected = protected(spans)
        replay.replay_all(length + answer)
        assert all(replay.protected <= set(own) for heads in replay.held for own in heads)


@pytest.mark.parametrize("rest", [5, 12])
def test_a_lookahead_right_after_the_last_piece(rest, checkpoints_folder):
    """The prompt's last 16 queries also score, and some of them are in that piece."""
    length = 4 * PIECE + rest
    more = {"max_whole": 300, "piece": PIECE, "lookahead": 8}
    config = settings("cake-chunk", 0.4, **more)
    spans = ["0:20", f"{length - 9}:{length}"]
    _, (pack_request,) = record(checkpoints_folder, config, tokens(length, seed=5), 30, spans)
    assert pack_request.output_tokens >= 8
    assert pack_request.plan.intact_from >= 4 * PIECE - 8


@pytest.mark.parametrize("spans", [["40:60"], ["2:9", "70:90", "140:150"]])
def test_protected_tokens_absorb_no_merged_tokens(spans, checkpoints_folder):
    """Protected tokens stay bit-identical after every compression; other tokens are merged."""
    prompt, answer = 200, 110
    config = settings("d2o", 0.6, decode_budget=96, decode_interval=INTERVAL)
    with engine(make(NAME, checkpoints_folder), additional_config=config) as llm:
        seen, repacked = llm.record_attention(), llm.watch_repacking()
        llm.submit("r", tokens(prompt, seed=5), answer, extra_args={"kv_protect": spans})
        times = 0
        while llm.llm.llm_engine.has_unfinished_requests():
            llm.step()
            if len(repacked) + (llm.compressor.compressed > 0) > times and llm.running():
                times = len(repacked) + (llm.compressor.compressed > 0)
                as_they_were(llm, seen, sorted(protected(spans)))
    assert times >= 3


def as_they_were(llm, seen, positions):
    """Check that each head's pages and tail contain the computed keys and values of tokens."""
    pool, shape = llm.compressor.pool, SHAPES[NAME]
    (slot,) = pool._slots.values()
    (request,) = llm.running()
    blocks = [block.block_id for block in llm.manager.req_to_blocks[request.request_id]]
    own_blocks = torch.tensor([block for block in blocks if block], dtype=torch.int64)
    merged = 0
    for layer, count in enumerate(pool._num_packed[slot].tolist()):
        pages = pool._packed[slot, layer, :count].long()
        pages = torch.cat([pages, pool.flat_ids(layer, own_blocks)])
        keys, values = llm.compressor.packer.mover.read(pages)
        held = keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)
        for part, name in zip(held, "kv", strict=True):
            computed = torch.cat([each.flatten(1) for each in seen[layer][name]])
            computed = computed.view(len(computed), shape.kv_heads, shape.head_dim)
            for head in range(shape.kv_heads):
                rows = {row.numpy().tobytes() for row in part[head]}
                assert all(computed[at, head].numpy().tobytes() in rows for at in positions)
                merged += len(rows - {row.numpy().tobytes() for row in computed[:, head]})
    assert merged > 0, "others were meant to be merged"


PROMPTS = [tokens(length, seed=70 + length) for length in (150, 301, 420, 290)]
# two requests with the same number of protected tokens are compressed in one step
ASKS = [["0:17"], ["5:22"], ["40:60", "400:403"], "none"]
NUM_OUTPUT = 48  # longer than the decode interval and a block


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("cake", {"decode_budget": 96, "decode_interval": 32}),
        ("d2o", {"decode_budget": 96, "decode_interval": 32}),
        ("cake-chunk", {"lookahead": LOOKAHEAD}),
    ],
)
def test_outputs_depend_only_on_the_requests_own_spans(method, more, checkpoints_folder):
    """Not on concurrent requests, chunks, the prefix cache or preemptions."""
    model = make(NAME, checkpoints_folder)
    config = settings(method, 0.4, allow_override=method, **more)
    extra_args = [{"kv_protect": spans} for spans in ASKS]
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        repacked = llm.watch_repacking()
        alone = [
            llm.generate([prompt], NUM_OUTPUT, extra_args=ask)[0]
            for prompt, ask in zip(PROMPTS, extra_args, strict=True)
        ]
        assert bool(repacked) == ("decode_budget" in more)
        unprotected = llm.generate(PROMPTS, NUM_OUTPUT)
    assert alone[3] == unprotected[3]
    assert alone[:3] != unprotected[:3]
    for size in (64, 8192):
        with engine(
            model,
            additional_config=config,
            max_num_seqs=8,
            max_model_len=1024,
            max_num_batched_tokens=max(size, 1024) if method == "d2o" else size,
        ) as llm:
            free = llm.free_blocks
            for order in (1, -1):
                for at in range(4)[::order]:
                    llm.submit(str(at), PROMPTS[at], NUM_OUTPUT, extra_args=extra_args[at])
                got = llm.drain()
                assert [got[str(at)] for at in range(4)] == alone
            llm.finish_in_flight_steps()
            assert llm.free_blocks == free
            assert not llm.compressor.packer.protected


def test_all_outputs_of_a_prompt_share_its_spans(checkpoints_folder):
    model, config = make(NAME, checkpoints_folder), settings("cake", 0.4)
    with engine(model, additional_config=config) as llm:
        packed = llm.watch_packing(lambda done: done.pack_request.plan.spans)
        (output,) = llm.outputs(
            PROMPTS[1:2], 8, n=2, temperature=1, extra_args={"kv_protect": "0:17"}
        )
        assert len(output.outputs) == 2
        assert packed == [((0, 17),)] * 2


def test_protected_tokens_use_or_raise_the_budget(checkpoints_folder, watched):
    """A prompt with more than half protected stays uncompressed, with a reason."""
    model, prompt = make(NAME, checkpoints_folder), tokens(600, seed=3)
    with engine(model, additional_config=settings("snapkv", 0.3, allow_override="all")) as llm:
        packed = llm.watch_packing(lambda done: done.pack_request.plan)
        held = []
        for spans in ("none", "0:60", "0:300", "0:301"):
            llm.submit("r", prompt, 8, extra_args={"kv_protect": spans})
            while not llm.running():
                llm.step()
            while llm.running()[0].num_output_tokens < 4:
                llm.step()
            held.append(llm.num_blocks_held(llm.running()[0].request_id))
            llm.drain()
    own, within, raised = packed
    assert (within.pages, within.raised) == (own.pages, False)
    # 300 and half of the budget's 180, less the tail's tokens, rounded to pages
    assert raised.raised
    assert raised.pages == 4 * -(-(300 + 90 - 600 % BLOCK) // BLOCK)
    assert held[0] == held[1] < held[2] < held[3] == 19
    assert watched("skipped") == {"protected": 1}
    assert watched("raised_budgets") == {"": 1}
    assert watched("protected_tokens") == {"": 360}

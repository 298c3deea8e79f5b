"""When a prompt is packed while it is computed, and what it holds: from lengths alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import pages_kept
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.holding import Holding
from vllm_kvcompress.planning.memory import Sizes, _most_pages
from vllm_kvcompress.planning.obstacles import why_no_room_for_probe
from vllm_kvcompress.planning.pieces import pieces_of
from vllm_kvcompress.planning.schedules import LookAhead
from vllm_kvcompress.planning.standing import standing_blocks
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import judging_ends, probe_tokens

prop = settings(derandomize=True, deadline=None, max_examples=200)


def config(**more):
    return CompressionConfig.parse({"compress": "snapkv", "min_prompt": 1, **more})


@st.composite
def probes(draw):
    last = draw(st.sampled_from([0, 1, 2, 3, 32]))
    return {"probe": last, "probe_first": draw(st.sampled_from([0, 1, 20])) if last else 0}


@st.composite
def prompts(draw):
    """Settings, layers, tokens of a block and of a prompt."""
    block = draw(st.sampled_from([1, 4, 16]))
    window = draw(st.integers(1, 12))
    piece = block * draw(st.integers(window // block + 1, window // block + 8))
    judging = draw(probes())
    least = max(2, sum(judging.values()) - 1)
    budget = draw(st.floats(0.02, 1.0) | st.integers(window + 1, 20 * block + window + 1))
    own = config(
        compress=draw(st.sampled_from(["snapkv", "pyramidkv", "cake"])),
        window=max(window, 2),
        piece=max(piece, block * (least // block + 1)),
        **judging,
        max_whole=draw(st.integers(1, 40 * block)),
        budget=budget if isinstance(budget, float) else max(budget, 4),
        protect=draw(st.sampled_from(["none", "system"])),
    )
    return own, draw(st.integers(1, 5)), block, draw(st.integers(1, 90 * block))


@prop
@given(prompts(), st.lists(st.integers(0, 400), max_size=6, unique=True))
def test_what_is_held_stays_within_its_bound(case, edges):
    """Pages are exact at every boundary, and a layer's bound on the host holds.

    Whatever is protected: what needs more than may be held is told before.
    """
    own, layers, size, tokens = case
    inside = sorted(edge for edge in edges if edge < tokens)
    spans = tuple(zip(inside[::2], inside[1::2], strict=False))
    pieces = pieces_of(own, layers, size, tokens, spans)
    if pieces is None or pieces.protects_too_much:
        return
    holding = Holding(num_layers=layers, block_size=size)
    first, most, computed, packed = pieces.first_end, pieces.most_blocks, 0, 0
    assert own.max_whole < tokens
    # what is held beyond the budget takes no more than a prompt that stands whole
    kept = -(-pages_kept(own.prompt(layers, tokens), 0, size) // layers)
    piece_and_probe = own.piece // size - (-probe_tokens(own) // size)
    assert most <= max(own.max_whole // size, kept + piece_and_probe)
    assert first < tokens
    while computed < tokens:
        start, computed = computed, pieces.next_end(computed)
        assert start < computed <= start + own.piece
        assert computed % own.piece == 0 or computed == tokens
        probe = pieces.chunk(holding, start, tokens - start)[1]
        assert packed + -(-(computed + probe) // size) - holding.first_block <= most
        for inside in range(start + 1, computed):
            assert pieces.plan(holding, inside) is None
        plan = pieces.plan(holding, computed)
        assert (plan is not None) == (computed >= first)
        assert probe == (0 if plan is None else plan.probe) <= min(probe_tokens(own), tokens)
        if plan is None:
            continue
        held = holding.pages + layers * (computed // size - holding.first_block)
        assert plan.guarded == count_before(spans, plan.settled) <= computed
        assert layers * plan.floor_pages <= plan.pages <= held
        assert plan.pages < held or computed == tokens
        assert plan.tail == (tokens % size if computed == tokens else 0) + probe
        assert -(-held // layers) <= plan.full_blocks
        assert not packed or plan.blocks <= packed
        packed = plan.blocks
        holding.pack(plan, computed // size)
        assert holding.most_pages * layers >= holding.pages
    # at its end as a prompt that stands whole; but what is protected raises it to no more than is
    # held between pieces
    whole, alone = (own.page_plan(layers, tokens, size, each) for each in (spans, ()))
    assert alone is not None
    assert whole is not None or spans
    assert whole is None or holding.pages == min(
        whole.pages, held, max(pieces.held_pages, alone.pages)
    )


@prop
@given(prompts())
def test_the_pool_that_one_request_needs(case):
    """No shorter prompt takes more than the longest, or one that stands whole."""
    own, layers, size, longest = case
    most = standing_blocks(own, layers, size, longest)
    assert most <= -(-longest // size)
    for tokens in {1, own.max_whole, own.max_whole + 1, longest // 2, longest - 1, longest}:
        if not 0 < tokens <= longest:
            continue
        pieces = pieces_of(own, layers, size, tokens)
        needed = -(-tokens // size) if pieces is None else pieces.most_blocks
        assert needed <= most


@prop
@given(prompts())
def test_room_is_set_aside_for_all_that_is_held(case):
    """Of every prompt up to the longest, between its pieces and once it has ended."""
    own, layers, size, longest = case
    sizes = Sizes(
        layers=layers, heads=1, kv_heads=1, head_dim=1, itemsize=1, longest=longest,
        block_size=size, max_requests=1,
    )  # fmt: skip
    most = _most_pages(sizes, own, own)
    for tokens in {own.max_whole + 1, longest // 2, longest - 1, longest}:
        pieces = pieces_of(own, layers, size, tokens) if 0 < tokens <= longest else None
        if pieces is not None:
            assert pieces.held_pages <= most


@prop
@given(
    longest=st.integers(2, 3000),
    layers=st.integers(1, 8),
    size=st.sampled_from([1, 16, 128]),
    budget=st.floats(0.01, 0.99) | st.integers(40, 2000),
    lookahead=st.sampled_from([0, 32]),
    span=st.tuples(st.integers(0, 3000), st.integers(0, 1500)),
    protect=st.sampled_from(["none", "system"]),
    grown=st.integers(0, 400),
)
def test_room_is_set_aside_for_what_is_protected(
    longest, layers, size, budget, lookahead, span, protect, grown
):
    """Of every prompt up to the longest, whatever its budget is raised to, by whom it may be.

    Also where it comes again with an answer, and what its window has of it stands in pages then.
    """
    own = CompressionConfig.parse(
        {"compress": "snapkv", "budget": budget, "protect": protect, "lookahead": lookahead}
        | {"min_prompt": 0}
    )
    sizes = Sizes(
        layers=layers, heads=1, kv_heads=1, head_dim=1, itemsize=1, longest=longest,
        block_size=size, max_requests=1,
    )  # fmt: skip
    most = _most_pages(sizes, own, own)
    for tokens in {1, longest // 2, longest - lookahead - 1, longest - lookahead}:
        asked = tokens - grown
        start, stop = min(span[0], asked), min(sum(span), asked)
        spans = ((start, stop),) if start < stop else ()
        if asked < 1:
            continue
        plan, alone = (own.page_plan(layers, asked, size, each) for each in (spans, ()))
        if alone is None:
            continue  # it is left whole, then and later
        if protect == "none" and (plan is None or plan.raised):
            continue  # refused
        ahead = LookAhead(
            settings=own, num_layers=layers, block_size=size, prompt=tokens, last=longest + 2,
            prefilled=tokens, spans=spans,
        )  # fmt: skip
        plan = ahead.kept(Holding(num_layers=layers, block_size=size), tokens + lookahead)
        assert plan is None or plan.pages <= most


def test_a_step_needs_room_for_a_token_of_each_request_and_a_probe():
    own = config(compress="cake", max_whole=4096, piece=1024, probe=32)
    flag = "--max-num-batched-tokens"
    assert why_no_room_for_probe(own, 4, (flag, 36)) is None
    reason = why_no_room_for_probe(own, 4, (flag, 35))
    assert f"set {flag} to at least 36, got 35, or lower --max-num-seqs, --kv-probe" in reason


@prop
@given(prompts(), st.data())
def test_no_step_goes_beyond_its_room_or_the_prompt(case, data):
    """Whatever room the steps have, the same tokens judge the same boundaries."""
    own, layers, size, tokens = case
    pieces = pieces_of(own, layers, size, tokens)
    if pieces is None:
        return

    def judged(rooms):
        holding, computed, found = Holding(num_layers=layers, block_size=size), 0, []
        while computed < tokens:
            room = min(next(rooms), tokens - computed)
            chunk, probe = pieces.chunk(holding, computed, room)
            assert 0 <= chunk + probe <= room
            # a step that comes to the prompt's end would sample
            assert probe == 0 or computed + chunk + probe < tokens
            computed += chunk
            plan = pieces.plan(holding, computed) if chunk else None
            if plan is not None:
                assert plan.probe == probe
                found.append((computed, probe))
                holding.pack(plan, computed // size)
        return found

    rows = probe_tokens(own)
    rooms = st.integers(rows + 1, rows + own.piece + 5)
    assert judged(iter(lambda: data.draw(rooms), None)) == judged(iter(lambda: tokens, None))


def test_by_hand():
    """6,000 tokens, a tenth of them, blocks of 128, pieces of 1,024, 30 layers."""
    given = {"budget": 0.1, "piece": 1024, "window": 32, "probe": 60, "probe_first": 40}
    own = config(max_whole=2000, **given)
    pieces = pieces_of(own, 30, 128, 6000)
    holding, ends, kept = Holding(num_layers=30, block_size=128), [], []
    while not ends or ends[-1] < 6000:
        ends.append(pieces.next_end(ends[-1] if ends else 0))
        plan = pieces.plan(holding, ends[-1])
        kept.append(plan.pages)
        holding.pack(plan, ends[-1] // 128)
    assert ends == [1024, 2048, 3072, 4096, 5120, 6000]
    # 2,000 tokens less a piece and a probe, in whole blocks; at the end 488 beside the tail of 112
    # are 114 pages, whose 4 blocks have 120
    assert kept == [30 * 6] * 5 + [30 * 4]
    assert pieces.most_blocks == 6 + 8 + 1
    # the budget where it is more: 600 tokens of each layer, 140 pages, in 5 blocks
    least = pieces_of(config(max_whole=1500, **given), 30, 128, 6000)
    assert least.held_pages == 30 * 5
    assert least.most_blocks == 5 + 8 + 1
    assert [pieces.probe(end) for end in (1024, 5120, 5950, 5999, 6000)] == [100, 100, 49, 0, 0]
    # fewer rows than a window has are a template's at most: the piece's own tokens judge then
    assert [pieces.probe(end) for end in (5967, 5968)] == [32, 0]
    assert standing_blocks(own, 30, 128, 6000) == 16  # what stands whole, up to 2,000 tokens
    assert standing_blocks(config(), 30, 128, 6000) == 47


def test_who_is_judged_by_its_own_pieces():
    """A probe is dropped: nothing may be folded into it, and it is no use without queries."""
    given = {"budget": 0.1, "max_whole": 2000, "piece": 1024, "probe": 60}
    for own in ({"merge": True}, {"merge": "values"}, {"compress": "h2o"}, {"probe": 0}):
        pieces = pieces_of(config(**(given | own)), 30, 128, 6000)
        assert pieces.chunk(Holding(num_layers=30, block_size=128), 0, 4096) == (1024, 0)


def test_a_server_that_compresses_nothing_by_itself_names_what_requests_may_ask_for():
    given = {"max_whole": 2000, "piece": 1024, "probe": 60}
    assert judging_ends(config(compress="off", allow_override="all", **given)) == (0, 60)
    assert judging_ends(config(compress="off", allow_override="h2o", **given)) == (0, 0)
    assert judging_ends(config(compress="h2o", allow_override="all", **given)) == (0, 0)
    assert judging_ends(config(compress="off")) == (0, 0)
    assert judging_ends(config(**given, probe_first=40)) == (40, 60)


def test_what_may_be_asked_for_counts_only_if_nobody_must_name_it():
    own = config(budget=64, max_whole=256, piece=64, window=8)
    free = config(budget=64, max_whole=256, piece=64, window=8, allow_override="tova,off")
    named = config(budget=64, max_whole=256, piece=64, window=8, alias={"more": "snapkv:512"})
    assert standing_blocks(own, 2, 16, 4096) == 16
    assert standing_blocks(free, 2, 16, 4096) == 16
    assert standing_blocks(named, 2, 16, 4096) == (512 + 64 + probe_tokens(own)) // 16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"piece": 64}, "--kv-piece needs --kv-max-whole; set it, or remove --kv-piece"),
        ({"probe": 8}, "--kv-probe needs --kv-max-whole; set it, or remove --kv-probe"),
        ({"probe": 0.5, "max_whole": 64}, "probe must be a whole number of tokens, got 0.5"),
        ({"probe": -1, "max_whole": 64}, "probe: .*greater than or equal to 0, got -1"),
        ({"probe_first": 8}, "--kv-probe-first needs --kv-max-whole; set it, or remove"),
        (
            {"probe": 0, "probe_first": 8, "max_whole": 64},
            "got --kv-probe-first 8; set --kv-probe above 0, or remove --kv-probe-first",
        ),
        (
            {"probe": 600, "probe_first": 500, "max_whole": 64},
            "probe and probe_first must be at most 1024 tokens together, got 600 and 500",
        ),
        (
            {"max_whole": 64, "piece": 48, "probe": 32, "probe_first": 17},
            "must be at most piece together, got 32 and 17 with piece 48; raise piece",
        ),
        ({"max_whole": 64, "min_prompt": 65}, "max_whole must be at least min_prompt=65.*got 64"),
        (
            {"max_whole": 64, "piece": 8, "window": 8},
            "piece must be above the observation window of 8, got 8",
        ),
        ({"max_whole": 0}, "max_whole: .*greater than or equal to 1, got 0"),
        ({"max_whole": True}, "max_whole must be a whole number of tokens, got True"),
        ({"piece": 64.5, "max_whole": 64}, "piece must be a whole number of tokens, got 64.5"),
    ],
)
def test_wrong_settings_say_what_must_hold(given, message):
    with pytest.raises(ConfigError, match=message):
        config(**given)

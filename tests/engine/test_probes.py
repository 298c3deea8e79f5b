"""Pieces that the prompt's ends judge: what a probe computes, what it decides, and what it leaves.

The reference sees what the attention layers received, a probe's rows among it. It takes them out by
their number alone: a step of a prompt in pieces never goes beyond a boundary by itself.
"""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from checkpoints import SHAPES, make, tokens
from configuring import configure
from engines import BLOCK, V2, engine, first_runner, settings
from test_decode_budgets import kept_of_heads, least_pages, rounded, scores_of
from test_prompts_in_pieces import IN_CHUNKS, PIECE, WHOLE, Prompt, piecewise, shares
from vllm_kvcompress.errors import ConfigError

FIRST, LAST = 10, 14
PROBE = {"probe_first": FIRST, "probe": LAST}
ROWS = FIRST + LAST
METHODS = ["snapkv", "pyramidkv", "tova", "cake", "chunkkv", "cake-chunk", "caote", "fastcaote"]


def without_probes(seen, prompt):
    """What was computed of the prompt itself, and by boundary the rows behind it."""
    rows, probes, computed = [], {}, 0
    for at, q in enumerate(seen[0]["q"]):
        boundary = min((computed // PIECE + 1) * PIECE, prompt) if computed < prompt else math.inf
        chunk = min(len(q), boundary - computed)
        rows.append(chunk)
        computed += chunk
        if len(q) > chunk:
            probes[computed] = at
    own, behind = {}, {end: {} for end in probes}
    for layer, parts in seen.items():
        own[layer] = {"sinks": parts["sinks"]}
        for name in ("q", "k", "v", "out"):
            own[layer][name] = [part[:n] for part, n in zip(parts[name], rows, strict=True)]
            for end, at in probes.items():
                behind[end][layer, name] = parts[name][at][rows[at] :]
    return own, behind


class Guided(Prompt):
    """A prompt whose pieces are judged by the rows of their probes."""

    def __init__(self, method, shape, seen, prompt, budget) -> None:
        own, behind = without_probes(seen, prompt)
        super().__init__(method, shape, own, prompt, budget)
        self.behind = {
            end: {
                at: part.double().flatten(1).view(len(part), -1, shape.head_dim).numpy()
                for at, part in parts.items()
            }
            for end, parts in behind.items()
        }

    def pack_prompt(self, computed, cap, tail, low, lengths) -> None:
        left = min(ROWS, self.prompt - computed - 1)
        if left < max(min(self.w, ROWS), 2 if "cake" in self.method else 1):
            assert computed not in self.behind
            super().pack_prompt(computed, cap, tail, low, lengths)
            return
        assert tail == 0
        shape, found = self.shape, []
        for layer in range(shape.layers):
            found.append(self.judged(computed, layer, left))
        most = (self.most_pages + computed // BLOCK - self.first_block) * BLOCK + left
        given = shares(
            self.method,
            [stats for _, stats in found],
            *(
                shape.layers,
                most,
                cap * BLOCK // shape.layers + left,
                left + self.guarded(computed),
            ),
            [n + left for n in lengths],
        )
        full = [length // BLOCK for length in lengths]
        low = least_pages(left, left, self.guarded(computed))
        pages = rounded([n - left for n in given], cap, low, full)
        size = ref.CHUNKS.get(self.method)
        for layer, (scores, _) in enumerate(found):
            keep = pages[layer] * BLOCK
            past = lengths[layer]
            kept = kept_of_heads(scores, self.held[layer], past, keep, size, self.protected)
            for kv, own in enumerate(self.held[layer]):
                self.held[layer][kv] = [own[j] for j in kept[kv]]
        self.most_pages = min(most // BLOCK, cap - (shape.layers - 1) * low)
        self.first_block, self.pages = computed // BLOCK, cap
        self.packed_at.append(computed)

    def judged(self, computed, layer, left):
        """What the probe's queries make of what a layer holds; and that they attended to that."""
        q, k, v, out = (self.behind[computed][layer, name] for name in ("q", "k", "v", "out"))
        assert len(q) == left
        q = ref.with_sinks(q, getattr(self.parts[layer, "q"], "sinks", None))
        keys, values = (
            np.stack(
                [
                    np.concatenate([self.parts[layer, name][own, kv], behind[:, kv]])
                    for kv, own in enumerate(self.held[layer])
                ]
            )
            for name, behind in (("k", k), ("v", v))
        )
        for head in range(self.shape.heads):
            kv = head * self.shape.kv_heads // self.shape.heads
            for row in range(left):
                end = keys.shape[1] - left + row + 1
                logits = keys[kv, :end] @ np.asarray(q)[row, head]
                share = ref.softmax(logits / math.sqrt(self.shape.head_dim), self.sink(layer, head))
                want = share @ values[kv, :end]
                assert np.abs(out[row, head] - want).max() < 1e-4
        last = left - left * FIRST // ROWS
        return scores_of(self.method, q, keys, values, left, last if last > 1 else None)


CASES = [
    *((method, 531, WHOLE) for method in METHODS),
    # of the last boundary 12 rows judge, then none: its piece does
    ("cake", 589, WHOLE),
    ("snapkv", 581, WHOLE),
    # more than the budget may be held before the end
    *((method, 531, 450) for method in ("snapkv", "cake-chunk", "pyramidkv")),
]


@pytest.mark.parametrize(("method", "length", "whole"), [("cake", 531, 450)] if V2 else CASES)
def test_the_prompts_ends_judge_every_piece(method, length, whole, checkpoints_folder):
    """Against float64; by its first and last tokens, at the positions behind the piece."""
    name, budget, answer = "llama-gqa", int(length * 0.4), 20
    shape, prompt = SHAPES[name], tokens(length, seed=5)
    with engine(
        make(name, checkpoints_folder),
        additional_config=piecewise(method, max_whole=whole, **PROBE),
        **IN_CHUNKS,
    ) as llm:
        seen, free, most, fed = llm.record_attention(), llm.free_blocks, 0, record_inputs(llm)
        llm.submit("r", prompt, answer)
        while llm.llm.llm_engine.has_unfinished_requests():
            llm.step()
            most = max(most, free - llm.free_blocks)
        assert llm.free_blocks == free
        pieces = llm.manager.planner.admissions.pieces(llm.manager.settings, length)
        assert most <= pieces.most_blocks + 1
    replay = Guided(method, shape, seen, length, budget)
    replay.inside = (whole // BLOCK - PIECE // BLOCK - -(-ROWS // BLOCK)) * BLOCK
    replay.to_the_end(length + answer)
    assert replay.packed_at[-1] == length
    assert len(replay.packed_at) >= 3
    for end in replay.behind:
        (ids, positions) = next(step for step in fed if step[1][-1] >= end > step[1][0])
        rows = int(positions[-1]) + 1 - end
        assert rows == min(ROWS, length - end - 1)
        assert positions == list(range(positions[0], end + rows))
        first = rows * FIRST // ROWS
        lent = prompt[:first] + prompt[first - rows :]
        assert ids == prompt[positions[0] : end] + lent


def record_inputs(llm):
    """From now on: of each step the ids and positions that the model was called with."""
    fed, model = [], llm.worker.model_runner.model
    forward = model.forward

    def recording(input_ids, positions, *args, **kwargs):
        fed.append((input_ids.tolist(), positions.tolist()))
        return forward(input_ids, positions, *args, **kwargs)

    model.forward = recording
    return fed


def test_nothing_reads_what_a_probe_wrote(checkpoints_folder):
    """Neither the next chunks, however short, nor another request that finds its blocks."""
    model, prompt = make("llama-gqa", checkpoints_folder), tokens(531, seed=6)
    config = piecewise("cake", **PROBE)
    options = {"max_num_seqs": 4, "max_model_len": 1024, "max_num_batched_tokens": ROWS + 5}
    with engine(model, additional_config=config, **options) as llm:
        want = llm.generate([prompt], 20)
        assert llm.scheduler.reset_prefix_cache()
        context = llm.worker.vllm_config.compilation_config.static_forward_context
        layers = [layer for layer in context.values() if hasattr(layer, "impl")]
        for _ in range(2):  # the second finds what the first one left in the prefix cache
            llm.submit("r", prompt, 20)
            poisoned, done = 0, {}
            while llm.llm.llm_engine.has_unfinished_requests():
                done |= llm.step()
                poisoned += poison(llm, layers)
            assert poisoned >= 3
            assert [list(output.outputs[0].token_ids) for output in done.values()] == want


def poison(llm, layers):
    """Write nonsense behind what is computed of a prompt; returns in how many prompts."""
    poisoned = 0
    for request in llm.running():
        computed = request.num_computed_tokens
        blocks = llm.manager.req_to_blocks[request.request_id]
        room = len(blocks) * BLOCK - computed
        if room <= 0 or computed >= request.num_prompt_tokens:
            continue
        places = range(computed, computed + room)
        slots = torch.tensor([blocks[at // BLOCK].block_id * BLOCK + at % BLOCK for at in places])
        for layer in layers:
            nonsense = torch.full((room, layer.num_kv_heads, layer.head_size), 400.0)
            layer.impl.do_kv_cache_update(layer, nonsense, nonsense, layer.kv_cache, slots)
        poisoned += 1
    return poisoned


@first_runner
def test_a_step_that_is_guessed_is_no_step(checkpoints_folder):
    """A pipeline guesses the next steps while this one admits requests: its probe stays its own.

    One stage runs, and the scheduler goes by two.
    """
    model, prompt = make("llama-gqa", checkpoints_folder), tokens(531, seed=6)
    config = piecewise("cake", **PROBE, lookahead=40)
    options = {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 512}
    with engine(model, additional_config=config, **options) as llm:
        (want,) = llm.generate([prompt], 60)
        following = llm.scheduler.next_step
        following._stages, following.pipelined = 2, True
        guess, guesses = following.blocks, []

        def noting(looking):
            before = dict(llm.manager.probes._rows)
            found = guess(looking)
            assert llm.manager.probes._rows == before
            guesses.append(max(before.values(), default=0))
            return found

        following.blocks = noting
        llm.submit("ahead", tokens(128, seed=1), 200)
        while not llm.manager.lookaheads:
            llm.step()
        llm.submit("r", prompt, 60)
        for number in range(12):
            llm.submit(f"short {number}", tokens(9, seed=number), 2)
            assert not any(name.startswith("r") for name in llm.step())
        done = llm.drain()
        assert max(guesses) == ROWS
    assert [answer for name, answer in done.items() if name.startswith("r")] == [want]


@first_runner
def test_a_stage_that_was_not_told_the_last_token_hears_of_it(checkpoints_folder):
    """A first stage that does not schedule ahead, at a preemption: the probe ends with that token.

    One stage runs, and forgets what a first one was not told yet.
    """
    model, prompt = make("llama-gqa", checkpoints_folder), tokens(531, seed=6)
    options = {"max_num_seqs": 4, "max_model_len": 1024, "enable_prefix_caching": False}
    with engine(model, additional_config=piecewise("cake", **PROBE), **options) as llm:
        llm.submit("r", prompt, 60)
        while llm.step() is not None and llm.running()[0].num_output_tokens < 20:
            pass
        (request,) = llm.running()
        ids = list(request.all_token_ids)
        llm.preempt(request)
        llm.scheduler.prev_step_scheduled_req_ids.clear()  # nobody resumes in the next step
        state = llm.worker.model_runner.requests[request.request_id]
        assert state.output_token_ids.pop() == ids[-1]
        fed = record_inputs(llm)
        llm.drain()
    probes = 0
    for got, positions in fed:
        # no step goes beyond a boundary but for a probe
        rows = positions[-1] + 1 - (positions[0] // PIECE + 1) * PIECE
        if rows > 0 and positions[0] < len(ids):
            first, probes = rows * FIRST // ROWS, probes + 1
            assert got[-rows:] == ids[:first] + ids[first - rows :]
    assert probes >= 3


def test_log_probabilities_of_a_prompt_know_nothing_of_probes(checkpoints_folder):
    """They come chunk by chunk, and are the same whatever chunks there are."""
    model, prompt = make("llama-gqa", checkpoints_folder), tokens(300, seed=7)
    found = []
    for room in (ROWS + 8, 512):
        with engine(
            model,
            additional_config=piecewise("cake", 0.2, **PROBE),
            max_num_seqs=4,
            max_model_len=512,
            max_num_batched_tokens=room,
        ) as llm:
            (output,) = llm.outputs([prompt], 4, prompt_logprobs=1)
        assert len(output.prompt_logprobs) == len(prompt)
        found.append(
            [place[at] for at, place in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        )
    for one, other in zip(*found, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@first_runner
def test_a_prompt_of_embeddings_is_judged_by_its_own_pieces(checkpoints_folder):
    """It has no tokens that could be computed behind them."""
    from vllm import SamplingParams

    model, prompt = make("llama-gqa", checkpoints_folder), tokens(400, seed=9)
    options = {"max_num_seqs": 4, "max_model_len": 512, "enable_prompt_embeds": True}
    with engine(model, additional_config=piecewise("cake", probe=0), **options) as llm:
        want = llm.generate([prompt], 10)
    with engine(model, additional_config=piecewise("cake", **PROBE), **options) as llm:
        assert llm.generate([prompt], 10) != want
        modules = dict(llm.worker.model_runner.model.named_modules())
        embeddings = modules["model.embed_tokens"].weight[torch.tensor(prompt)].detach()
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        inputs = {"prompt_embeds": embeddings.clone()}
        (output,) = llm.llm.generate([inputs], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids)] == want


@pytest.mark.parametrize(
    ("flag", "room", "least"),
    [
        ("max_num_batched_tokens", 39, 40),
        ("max_num_scheduled_tokens", 30, 40),
        ("long_prefill_token_threshold", 24, 25),
    ],
)
def test_a_step_that_never_has_room_for_a_probe_is_refused(flag, room, least, checkpoints_folder):
    """A token of every request, or of the prompt, stands before it: or it would wait for ever."""
    model, own = make("llama-gqa", checkpoints_folder), settings(max_whole=512, **PROBE)
    others = "" if "prefill" in flag else " --max-num-seqs,"
    sentence = (
        f"set --{flag.replace('_', '-')} to at least {least}, got {room}, or lower{others}"
        " --kv-probe or --kv-probe-first$"
    )
    with pytest.raises(ConfigError, match=sentence):
        configure(model, additional_config=own, max_num_seqs=16, **{flag: room})
    configure(model, additional_config=own, max_num_seqs=16, **{flag: least})

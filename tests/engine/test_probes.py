"""Probes: the prompt's first and last tokens score each piece of a long prompt.

The reference records the inputs of the attention layers, which include the probe tokens. It
separates them by position: without a probe, no step of a prompt in pieces crosses a piece boundary.
"""

import itertools
import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from checkpoints import SHAPES, make, tokens
from configuring import configure
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from test_decode_budgets import kept_slots_per_head, min_pages, round_to_pages, scores_of
from test_prompts_in_pieces import (
    CHUNKED_PREFILL,
    MAX_WHOLE,
    PIECE,
    PieceReplay,
    pieces_settings,
    token_budgets,
)
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.published.cake import Cake

FIRST, LAST = 10, 14
PROBE = {"probe_first": FIRST, "probe": LAST}
PROBE_TOKENS = FIRST + LAST
METHODS = ["snapkv", "pyramidkv", "tova", "cake", "chunkkv", "cake-chunk", "caote", "fastcaote"]


def without_probes(seen, prompt):
    """Split the recorded inputs into the prompt's own tokens and, by boundary, probe tokens."""
    rows, probes, computed = [], {}, 0
    for step, q in enumerate(seen[0]["q"]):
        boundary = min((computed // PIECE + 1) * PIECE, prompt) if computed < prompt else math.inf
        chunk = min(len(q), boundary - computed)
        rows.append(chunk)
        computed += chunk
        if len(q) > chunk:
            probes[computed] = step
    prompt_inputs, probe_inputs = {}, {end: {} for end in probes}
    for layer, parts in seen.items():
        prompt_inputs[layer] = {"sinks": parts["sinks"]}
        for name in ("q", "k", "v", "out"):
            prompt_inputs[layer][name] = [
                part[:n] for part, n in zip(parts[name], rows, strict=True)
            ]
            for end, step in probes.items():
                probe_inputs[end][layer, name] = parts[name][step][rows[step] :]
    return prompt_inputs, probe_inputs


class ProbeReplay(PieceReplay):
    """Float64 replay of a prompt whose pieces are scored by probe queries."""

    def __init__(self, method, shape, seen, prompt, budget) -> None:
        prompt_inputs, probe_inputs = without_probes(seen, prompt)
        super().__init__(method, shape, prompt_inputs, prompt, budget)
        self.probe_inputs = {
            end: {
                key: part.double().flatten(1).view(len(part), -1, shape.head_dim).numpy()
                for key, part in parts.items()
            }
            for end, parts in probe_inputs.items()
        }

    def pack_prompt(self, computed, cap, tail, low, lengths) -> None:
        probe_tokens = min(PROBE_TOKENS, self.prompt - computed - 1)
        if probe_tokens < max(min(self.w, PROBE_TOKENS), 2 if "cake" in self.method else 1):
            assert computed not in self.probe_inputs
            super().pack_prompt(computed, cap, tail, low, lengths)
            return
        assert tail == 0
        shape, observed = self.shape, []
        for layer in range(shape.layers):
            observed.append(self.probe_scores(computed, layer, probe_tokens))
        max_tokens = (
            self.max_layer_pages + computed // BLOCK - self.first_block
        ) * BLOCK + probe_tokens
        layer_tokens = token_budgets(
            self.method,
            [stats for _, stats in observed],
            shape.layers,
            max_tokens,
            cap * BLOCK // shape.layers + probe_tokens,
            probe_tokens + self.guarded(computed),
            [n + probe_tokens for n in lengths],
        )
        full = [length // BLOCK for length in lengths]
        low = min_pages(probe_tokens, probe_tokens, self.guarded(computed))
        pages = round_to_pages([n - probe_tokens for n in layer_tokens], cap, low, full)
        size = ref.CHUNKS.get(self.method)
        for layer, (scores, _) in enumerate(observed):
            keep = pages[layer] * BLOCK
            past = lengths[layer]
            kept = kept_slots_per_head(scores, self.held[layer], past, keep, size, self.protected)
            for kv, positions in enumerate(self.held[layer]):
                self.held[layer][kv] = [positions[j] for j in kept[kv]]
        self.max_layer_pages = min(max_tokens // BLOCK, cap - (shape.layers - 1) * low)
        self.first_block, self.pages = computed // BLOCK, cap
        self.packed_at.append(computed)

    def probe_scores(self, computed, layer, probe_tokens):
        """Return the probe's scores of a layer's tokens, after checking the probe's attention."""
        q, k, v, out = (self.probe_inputs[computed][layer, name] for name in ("q", "k", "v", "out"))
        assert len(q) == probe_tokens
        q = ref.with_sinks(q, getattr(self.parts[layer, "q"], "sinks", None))
        keys, values = (
            np.stack(
                [
                    np.concatenate([self.parts[layer, name][positions, kv], probe[:, kv]])
                    for kv, positions in enumerate(self.held[layer])
                ]
            )
            for name, probe in (("k", k), ("v", v))
        )
        for head in range(self.shape.heads):
            kv = head * self.shape.kv_heads // self.shape.heads
            for row in range(probe_tokens):
                end = keys.shape[1] - probe_tokens + row + 1
                logits = keys[kv, :end] @ np.asarray(q)[row, head]
                share = ref.softmax(logits / math.sqrt(self.shape.head_dim), self.sink(layer, head))
                expected = share @ values[kv, :end]
                assert np.abs(out[row, head] - expected).max() < 1e-4
        last = probe_tokens - probe_tokens * FIRST // PROBE_TOKENS
        return scores_of(self.method, q, keys, values, probe_tokens, last if last > 1 else None)


CASES = [
    *((method, 531, MAX_WHOLE) for method in METHODS),
    # At the last boundary the probe has 12 tokens, then 4: too few, so the piece's queries score.
    ("cake", 589, MAX_WHOLE),
    ("snapkv", 581, MAX_WHOLE),
    # the request may hold more than the budget before the end of the prompt
    *((method, 531, 450) for method in ("snapkv", "cake-chunk", "pyramidkv")),
]


@pytest.mark.parametrize(("method", "length", "max_whole"), [("cake", 531, 450)] if V2 else CASES)
def test_probe_queries_score_every_piece(method, length, max_whole, checkpoints_folder):
    """Against float64; the probe tokens have the positions right after the piece."""
    name, budget, output_tokens = "llama-gqa", int(length * 0.4), 20
    shape, prompt = SHAPES[name], tokens(length, seed=5)
    with engine(
        make(name, checkpoints_folder),
        additional_config=pieces_settings(method, max_whole=max_whole, **PROBE),
        **CHUNKED_PREFILL,
    ) as llm:
        seen, free, max_blocks, fed = llm.record_attention(), llm.free_blocks, 0, record_inputs(llm)
        llm.submit("r", prompt, output_tokens)
        while llm.llm.llm_engine.has_unfinished_requests():
            llm.step()
            max_blocks = max(max_blocks, free - llm.free_blocks)
        assert llm.free_blocks == free
        pieces = llm.scheduler.admissions.piece_schedule(llm.scheduler.admissions.settings, length)
        assert max_blocks <= pieces.max_blocks + 1
    replay = ProbeReplay(method, shape, seen, length, budget)
    replay.max_tokens_before_end = (
        max_whole // BLOCK - PIECE // BLOCK - -(-PROBE_TOKENS // BLOCK)
    ) * BLOCK
    replay.replay_all(length + output_tokens)
    assert replay.packed_at[-1] == length
    assert len(replay.packed_at) >= 3
    for end in replay.probe_inputs:
        (ids, positions) = next(step for step in fed if step[1][-1] >= end > step[1][0])
        rows = int(positions[-1]) + 1 - end
        assert rows == min(PROBE_TOKENS, length - end - 1)
        assert positions == list(range(positions[0], end + rows))
        first = rows * FIRST // PROBE_TOKENS
        probe_ids = prompt[:first] + prompt[first - rows :]
        assert ids == prompt[positions[0] : end] + probe_ids


def record_inputs(llm):
    """Return a list that collects the token ids and positions of each model call."""
    fed, model = [], llm.worker.model_runner.model
    forward = model.forward

    def recording(input_ids, positions, *args, **kwargs):
        fed.append((input_ids.tolist(), positions.tolist()))
        return forward(input_ids, positions, *args, **kwargs)

    model.forward = recording
    return fed


def test_a_layer_keeps_no_more_pages_than_it_has(model, monkeypatch):
    """With budgets that move to other layers at every boundary. Probe tokens fill no page.

    The probe is longer than a block, so counting it would add a page.
    """
    layers = SHAPES["llama-gqa"].layers
    boundaries, checked, full_layers = itertools.count(), 0, 0

    def allocate(self, spec, stats=None):
        rest, past = spec.past_total, torch.zeros(layers, dtype=torch.int64)
        first = next(boundaries)
        for layer in range(first, first + layers):
            past[layer % layers] = taken = min(rest, spec.past)
            rest -= taken
        return past

    monkeypatch.setattr(Cake, "allocate", allocate)
    config = pieces_settings("cake", max_whole=450, probe_first=BLOCK, probe=BLOCK)
    with engine(model, additional_config=config, **CHUNKED_PREFILL) as llm:
        divide = llm.compressor.packer._divide

        def checking_divide(method, pack_request, observed, source):
            nonlocal checked, full_layers
            counts, max_pages = divide(method, pack_request, observed, source)
            if pack_request.reads_page_tables:
                own = (source.lengths - pack_request.plan.probe) // BLOCK
                assert (counts <= own).all(), (counts, own)
                checked, full_layers = checked + 1, full_layers + int((counts == own).sum())
            return counts, max_pages

        monkeypatch.setattr(llm.compressor.packer, "_divide", checking_divide)
        llm.generate([tokens(589, seed=5)], 4)
    assert checked > 1
    assert full_layers > 1


def test_probe_tokens_are_never_read(model):
    """Neither later chunks, however short, nor a request that hits the prefix cache."""
    prompt = tokens(531, seed=6)
    config = pieces_settings("cake", **PROBE)
    options = {"max_num_seqs": 4, "max_model_len": 1024, "max_num_batched_tokens": PROBE_TOKENS + 5}
    with engine(model, additional_config=config, **options) as llm:
        expected = llm.generate([prompt], 20)
        assert llm.scheduler.reset_prefix_cache()
        context = llm.worker.vllm_config.compilation_config.static_forward_context
        layers = [layer for layer in context.values() if hasattr(layer, "impl")]
        for _ in range(2):  # the second request hits the prefix cache
            llm.submit("r", prompt, 20)
            poisoned, done = 0, {}
            while llm.llm.llm_engine.has_unfinished_requests():
                done |= llm.step()
                poisoned += poison(llm, layers)
            assert poisoned >= 3
            assert [list(output.outputs[0].token_ids) for output in done.values()] == expected


def poison(llm, layers):
    """Overwrite the slots after each prompt's computed tokens; return the number of prompts."""
    poisoned = 0
    for request in llm.running():
        computed = request.num_computed_tokens
        blocks = llm.manager.req_to_blocks[request.request_id]
        free_slots = len(blocks) * BLOCK - computed
        if free_slots <= 0 or computed >= request.num_prompt_tokens:
            continue
        positions = range(computed, computed + free_slots)
        slots = torch.tensor([blocks[p // BLOCK].block_id * BLOCK + p % BLOCK for p in positions])
        for layer in layers:
            garbage = torch.full((free_slots, layer.num_kv_heads, layer.head_size), 400.0)
            layer.impl.do_kv_cache_update(layer, garbage, garbage, layer.kv_cache, slots)
        poisoned += 1
    return poisoned


@model_runner_v1_only
def test_predicted_steps_do_not_change_probes(model):
    """A pipeline's prediction of the next steps does not change the probes of this step.

    The engine has one stage; the scheduler is told that there are two.
    """
    prompt = tokens(531, seed=6)
    config = pieces_settings("cake", **PROBE, lookahead=40)
    options = {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 512}
    with engine(model, additional_config=config, **options) as llm:
        (expected,) = llm.generate([prompt], 60)
        following = llm.scheduler.next_step
        following._num_stages = 2
        guess, guesses = following.blocks_for_running, []

        def noting(looking):
            before = {state.request_id: state.probe_tokens for state in llm.scheduler.states}
            found = guess(looking)
            after = {state.request_id: state.probe_tokens for state in llm.scheduler.states}
            assert after == before
            guesses.append(max(before.values(), default=0))
            return found

        following.blocks_for_running = noting
        llm.submit("ahead", tokens(128, seed=1), 200)
        while not llm.scheduler.lookaheads:
            llm.step()
        llm.submit("r", prompt, 60)
        for number in range(12):
            llm.submit(f"short {number}", tokens(9, seed=number), 2)
            assert not any(name.startswith("r") for name in llm.step())
        done = llm.drain()
        assert max(guesses) == PROBE_TOKENS
    assert [output for name, output in done.items() if name.startswith("r")] == [expected]


@model_runner_v1_only
def test_first_stage_gets_the_last_token_after_a_preemption(model):
    """Without async scheduling, a preemption withholds the last token, which ends the probe.

    The engine has one stage; the test removes the token that a first stage would not have yet.
    """
    prompt = tokens(531, seed=6)
    options = {"max_num_seqs": 4, "max_model_len": 1024, "enable_prefix_caching": False}
    with engine(model, additional_config=pieces_settings("cake", **PROBE), **options) as llm:
        llm.submit("r", prompt, 60)
        while llm.step() is not None and llm.running()[0].num_output_tokens < 20:
            pass
        (request,) = llm.running()
        ids = list(request.all_token_ids)
        llm.preempt(request)
        llm.scheduler.prev_step_scheduled_req_ids.clear()  # no request resumes in the next step
        state = llm.worker.model_runner.requests[request.request_id]
        assert state.output_token_ids.pop() == ids[-1]
        fed = record_inputs(llm)
        llm.drain()
    probes = 0
    for input_ids, positions in fed:
        # only probe tokens cross a piece boundary
        rows = positions[-1] + 1 - (positions[0] // PIECE + 1) * PIECE
        if rows > 0 and positions[0] < len(ids):
            first, probes = rows * FIRST // PROBE_TOKENS, probes + 1
            assert input_ids[-rows:] == ids[:first] + ids[first - rows :]
    assert probes >= 3


def test_prompt_logprobs_exclude_probe_tokens(model):
    """Prompt log-probabilities do not depend on the chunks in which they are computed."""
    # in Triton's interpreter, each prompt token costs as much as a step
    prompt = tokens(200 if V2 else 300, seed=7)
    logprobs = []
    for batched_tokens in (PROBE_TOKENS + 8, 512):
        with engine(
            model,
            additional_config=pieces_settings("cake", 0.2, **PROBE),
            max_num_seqs=4,
            max_model_len=512,
            max_num_batched_tokens=batched_tokens,
        ) as llm:
            (output,) = llm.outputs([prompt], 4, prompt_logprobs=1)
        assert len(output.prompt_logprobs) == len(prompt)
        logprobs.append(
            [
                candidates[token]
                for token, candidates in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
            ]
        )
    for one, other in zip(*logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@model_runner_v1_only
def test_prompt_embeddings_use_no_probe(model):
    """A prompt of embeddings has no token ids from which to build a probe."""
    from vllm import SamplingParams

    prompt = tokens(400, seed=9)
    options = {"max_num_seqs": 4, "max_model_len": 512, "enable_prompt_embeds": True}
    with engine(model, additional_config=pieces_settings("cake", probe=0), **options) as llm:
        expected = llm.generate([prompt], 10)
    with engine(model, additional_config=pieces_settings("cake", **PROBE), **options) as llm:
        assert llm.generate([prompt], 10) != expected
        modules = dict(llm.worker.model_runner.model.named_modules())
        embeddings = modules["model.embed_tokens"].weight[torch.tensor(prompt)].detach()
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        inputs = {"prompt_embeds": embeddings.clone()}
        (output,) = llm.llm.generate([inputs], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids)] == expected


@model_runner_v1_only
@pytest.mark.parametrize(
    ("flag", "too_low", "minimum"),
    [
        ("max_num_batched_tokens", 39, 40),
        ("max_num_scheduled_tokens", 30, 40),
        ("long_prefill_token_threshold", 24, 25),
    ],
)
def test_step_limit_below_the_probe_is_rejected(flag, too_low, minimum, model):
    """A step must have room for the probe plus a token of the prompt, or of every request."""
    config = settings(max_whole=512, **PROBE)
    alternative = "" if "prefill" in flag else " --max-num-seqs,"
    sentence = (
        f"set --{flag.replace('_', '-')} to at least {minimum}, got {too_low}, or"
        f" lower{alternative} --kv-probe or --kv-probe-first$"
    )
    with pytest.raises(ConfigError, match=sentence):
        configure(model, additional_config=config, max_num_seqs=16, **{flag: too_low})
    configure(model, additional_config=config, max_num_seqs=16, **{flag: minimum})

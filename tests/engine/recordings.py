"""Read back what a compressed request's pages hold, and what its attention layers received."""

from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from engines import BLOCK, engine
from kvcompress_kernels import k4v3


def recorded(model, config, prompt, num_output, extra_args=None, **options) -> SimpleNamespace:
    """Run one request in a new engine, and check that it leaves nothing behind.

    Returns:
        `seen`: what `Engine.record_attention` recorded. `packed`: the prompt's `PackRequest`s.
        `output`: token ids. `max_blocks`: the most blocks that it held between two steps.
    """
    options = {"max_num_seqs": 4, "max_model_len": 1024} | options
    with engine(model, additional_config=config, **options) as llm:
        seen, free, held, output = llm.record_attention(), llm.free_blocks, [], {}
        packed = llm.watch_packing(lambda done: done.pack_request)
        llm.submit("r", prompt, num_output, extra_args=extra_args)
        while llm.llm.llm_engine.has_unfinished_requests():
            output |= llm.step()
            held.append(free - llm.free_blocks)
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        assert not llm.compressor.packer.protected
    token_ids = list(output["r"].outputs[0].token_ids)
    return SimpleNamespace(seen=seen, packed=packed, output=token_ids, max_blocks=max(held))


def packed_pages(llm) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's packed keys and values ``[Hkv, n, D]`` of the one compressed request."""
    pool, held = llm.compressor.pool, []
    (slot,) = pool._slots.values()
    for layer, count in enumerate(pool._num_packed[slot].tolist()):
        keys, values = llm.compressor.packer.mover.read(pool._packed[slot, layer, :count].long())
        held.append((keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)))
    return held


def tail_pages(llm) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's keys and values ``[Hkv, BLOCK, D]`` of the prompt's tail block."""
    pool, held = llm.compressor.pool, []
    (request,) = llm.running()
    last = llm.manager.req_to_blocks[request.request_id][request.num_prompt_tokens // BLOCK]
    for layer in range(len(pool.layer_offset)):
        page = pool.flat_ids(layer, torch.tensor([last.block_id]))
        keys, values = llm.compressor.packer.mover.read(page)
        held.append((keys[0].mT, values[0]))
    return held


def watch_selections(llm) -> list[list[torch.Tensor]]:
    """Return a list that fills with the positions kept in pages, per compression and layer."""

    def selected(done):
        counts = (done.counts * done.pack_request.plan.block_size).tolist()
        kept = zip(done.kept, counts, strict=True)
        return [positions[:, :count].long() for positions, count in kept]

    return llm.watch_packing(selected)


def prompt_inputs(seen, length: int, dim: int) -> list[torch.Tensor]:
    """Return a prompt's queries, keys and values ``[L, H, S, D]`` from `record_attention`."""
    return [
        torch.stack(
            [
                torch.cat([part.flatten(1) for part in seen[layer][name]])[:length]
                .view(length, -1, dim)
                .transpose(0, 1)
                for layer in range(len(seen))
            ]
        )
        for name in "qkv"
    ]


def packed_bytes(llm, request_id) -> list[torch.Tensor]:
    """Return each layer's groups in k4v3 as bytes ``[Hkv, groups, 64 * D]``.

    Args:
        request_id: vLLM's id of a request with packed pages.
    """
    pool, layers = llm.compressor.pool, []
    slot = pool._slots[request_id]
    for layer, count in enumerate(pool._group_tokens[slot].tolist()):
        pages = -(-count // k4v3.page_tokens(pool.block_size, pool.itemsize))
        content = pool.byte_pages[pool._packed[slot, layer, 1 : 1 + pages].long()].flatten(2)
        content = content.unflatten(
            2, (-1, k4v3.rows_per_group(pool.itemsize) * pool.byte_pages.shape[-1])
        )
        layers.append(content.transpose(0, 1).flatten(1, 2)[:, : -(-count // k4v3.GROUP)])
    return layers


@contextmanager
def forced_outputs(llm, texts):
    """Let requests output given tokens, and yield the logits that the model computes for each.

    A request's prompt must be prefilled in one step.

    Args:
        texts: tokens to output, by the request id passed to `Engine.submit`.

    Yields:
        a dict that fills with a list of logits ``[vocabulary]`` by request id.
    """
    runner, logits_of = llm.worker.model_runner, defaultdict(list)
    compute_logits = runner.model.compute_logits

    def computing(*args, **kwargs):
        logits = compute_logits(*args, **kwargs)
        names = [name.split("-")[0] for name in runner.input_batch.req_ids]
        assert len(names) == len(logits)
        for name, row in zip(names, logits, strict=True):
            token = texts[name][len(logits_of[name])]
            logits_of[name].append(row.clone())
            row[token] = torch.inf
        return logits

    runner.model.compute_logits = computing
    yield logits_of
    del runner.model.compute_logits

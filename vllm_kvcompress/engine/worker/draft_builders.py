"""VllmHook `draft_builders`: the metadata builders of a draft model's layers, on either runner.

Model Runner V1 builds every draft's metadata with them. Model Runner V2 computes the first draft
with the target's metadata, and the others with them.
"""

from typing import Any


def draft_builders_of(runner: Any) -> list[Any]:
    """Return the metadata builders of a draft model's layers; empty without such layers."""
    if hasattr(runner, "req_states"):
        by_cache_group = getattr(runner.speculator, "attn_groups", [])
        attn_groups = [group for groups in by_cache_group for group in groups]
    else:
        attn_groups = getattr(getattr(runner, "drafter", None), "draft_attn_groups", [])
    return [builder for group in attn_groups for builder in group.metadata_builders]

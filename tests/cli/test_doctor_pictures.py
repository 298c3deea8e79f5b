"""``kvcompress doctor --explain`` of a chat that shows a picture: what stays of its tokens."""

import json

import pytest

from engines import prepare_model_runner
from vision_checkpoints import data_url, make, picture, without_videos

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures(without_videos.__name__)]
prepare_model_runner()


SHOWN = 12 * 10
FIRST = len(["<|im_start|>", *"user\n", "<|vision_start|>"])  # the picture's first token
FLAGS = (
    "--enforce-eager",
    "--block-size",
    "32",
    "--dtype",
    "float32",
    "--max-model-len",
    "1024",
    "--num-gpu-blocks-override",
    "65",
    "--limit-mm-per-prompt",
    '{"video": 0}',
)


@pytest.fixture
def explained(examined, tmp_path):
    """Ask what stays of a chat that shows a picture of `SHOWN` tokens."""
    shown = {"type": "image_url", "image_url": {"url": data_url(picture(12, 10, seed=1))}}
    asked = {"type": "text", "text": "The lamp is blue. " * 20}
    chat = {"messages": [{"role": "user", "content": [shown, asked]}]}
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    common = ("--kv-budget", "0.3", "--kv-min-prompt", "128", "--explain", "--json")

    def explaining(*flags):
        file = ("--prompt-file", str(tmp_path / "chat.json"))
        return examined("doctor", make("qwen3-vl", tmp_path), *common, *file, "--", *FLAGS, *flags)

    return explaining


def test_it_tells_what_stays_of_a_picture(explained):
    from vllm_kvcompress.doctor.kept import KeptMap

    done = explained()
    assert done.status == 0, done.out + done.err[-2000:]
    kept = KeptMap.from_json(json.loads(done.out)["kept"])
    assert list(kept.parts) == ["image", "other"]
    tokens, share = kept.parts["image"]
    assert tokens == SHOWN
    assert sum(tokens for tokens, _ in kept.parts.values()) == kept.prompt_tokens
    assert kept.mean == pytest.approx(sum(n * share for n, share in kept.parts.values()))
    assert f"image {share:.0%} of 120, other" in kept.by_part
    # counted again out of the map: buckets that lie within the picture, and those that touch it
    buckets = len(kept.share[0])
    of_bucket = [[] for _ in range(buckets)]
    for at in range(kept.prompt_tokens):
        of_bucket[at * buckets // kept.prompt_tokens].append(FIRST <= at < FIRST + SHOWN)
    stays = [len(held) * sum(row[b] for row in kept.share) for b, held in enumerate(of_bucket)]
    within, touching = (
        sum(n for n, held in zip(stays, of_bucket, strict=True) if which(held)) / kept.layers
        for which in (all, any)
    )
    assert 0 < within <= share * SHOWN + 1e-6 <= touching + 2e-6 < SHOWN


def test_a_picture_that_the_settings_refuse_is_told_before_it_runs(explained):
    done = explained("--kv-max-whole", "400", "--kv-piece", "128")
    assert done.status == 2, done.out
    told = " ".join(done.err.replace("│", " ").split())
    assert "a prompt with images must stand whole until its end" in told
    assert "--kv-max-whole is 400; send a shorter prompt" in told
    assert "worker" not in done.out

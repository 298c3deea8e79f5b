"""``kvcompress doctor --explain`` on a chat that contains an image."""

import json
import shlex

import pytest

from engines import prepare_model_runner
from vision_checkpoints import data_url, make, picture, without_videos
from vllm_kvcompress.doctor.kept import KeptMap

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures(without_videos.__name__)]
prepare_model_runner()


IMAGE_TOKENS = 12 * 10
IMAGE_START = len(["<|im_start|>", *"user\n", "<|vision_start|>"])
FLAGS = shlex.split(
    "--enforce-eager --block-size 32 --dtype float32 --max-model-len 1024"
    """ --num-gpu-blocks-override 65 --limit-mm-per-prompt '{"video": 0}'"""
)


@pytest.fixture
def explained(run_doctor_in_process, tmp_path):
    """Return a function that runs ``--explain`` on a chat with an image of `IMAGE_TOKENS`."""
    image = {"type": "image_url", "image_url": {"url": data_url(picture(12, 10, seed=1))}}
    text = {"type": "text", "text": "The lamp is blue. " * 20}
    chat = {"messages": [{"role": "user", "content": [image, text]}]}
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    common = ("--kv-budget", "0.3", "--kv-min-prompt", "128", "--explain", "--json")

    def explain(*flags):
        file = ("--prompt-file", str(tmp_path / "chat.json"))
        return run_doctor_in_process(
            "doctor", make("qwen3-vl", tmp_path), *common, *file, "--", *FLAGS, *flags
        )

    return explain


def test_kept_share_of_an_image_is_reported(explained):
    done = explained()
    assert done.status == 0, done.out + done.err[-2000:]
    kept = KeptMap.from_json(json.loads(done.out)["kept"])
    assert list(kept.parts) == ["image", "other"]
    tokens, share = kept.parts["image"]
    assert tokens == IMAGE_TOKENS
    assert sum(tokens for tokens, _ in kept.parts.values()) == kept.prompt_tokens
    assert kept.mean == pytest.approx(sum(n * share for n, share in kept.parts.values()))
    assert f"image {share:.0%} of 120, other" in kept.by_part
    # The kept tokens in buckets inside the image are a lower bound on the image's kept tokens, and
    # those in buckets that overlap it are an upper bound.
    buckets = len(kept.share[0])
    in_image = [[] for _ in range(buckets)]
    for position in range(kept.prompt_tokens):
        bucket = position * buckets // kept.prompt_tokens
        in_image[bucket].append(IMAGE_START <= position < IMAGE_START + IMAGE_TOKENS)
    kept_in_bucket = [
        len(flags) * sum(layer[b] for layer in kept.share) for b, flags in enumerate(in_image)
    ]
    inside, overlapping = (
        sum(n for n, flags in zip(kept_in_bucket, in_image, strict=True) if matches(flags))
        / kept.layers
        for matches in (all, any)
    )
    kept_of_image = share * IMAGE_TOKENS
    assert 0 < inside <= kept_of_image + 1e-6 <= overlapping + 2e-6 < IMAGE_TOKENS


def test_unsupported_image_is_rejected_before_the_engine_runs(explained):
    done = explained("--kv-max-whole", "400", "--kv-piece", "128")
    assert done.status == 2, done.out
    message = " ".join(done.err.replace("│", " ").split())
    assert "a prompt with images must be compressed after its prefill" in message
    assert "--kv-max-whole is 400; send a shorter prompt" in message
    assert "worker" not in done.out

"""``kvcompress doctor --explain`` of a chat that shows a picture: what stays of its tokens."""

import base64
import io
import json

import pytest

from engines import prepare_model_runner
from vision_checkpoints import make, picture, without_videos

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures(without_videos.__name__)]
prepare_model_runner()


def test_it_tells_what_stays_of_a_picture(examined, tmp_path):
    from vllm_kvcompress.doctor.kept import KeptMap

    out = io.BytesIO()
    picture(12, 10, seed=1).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    shown = {"type": "image_url", "image_url": {"url": url}}
    asked = {"type": "text", "text": "The lamp is blue. " * 20}
    chat = {"messages": [{"role": "user", "content": [shown, asked]}]}
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    done = examined(
        "doctor", make("qwen3-vl", tmp_path), "--kv-budget", "0.3", "--kv-min-prompt", "128",
        "--prompt-file", str(tmp_path / "chat.json"), "--explain", "--json", "--",
        "--enforce-eager", "--block-size", "32", "--dtype", "float32", "--max-model-len", "1024",
        "--num-gpu-blocks-override", "65", "--limit-mm-per-prompt", '{"video": 0}',
    )  # fmt: skip
    assert done.status == 0, done.out + done.err[-2000:]
    kept = KeptMap.from_json(json.loads(done.out)["kept"])
    assert list(kept.parts) == ["image", "other"]
    assert kept.parts["image"][0] == 12 * 10
    assert sum(tokens for tokens, _ in kept.parts.values()) == kept.prompt_tokens
    assert kept.mean == pytest.approx(sum(n * share for n, share in kept.parts.values()))
    assert 0 < kept.parts["image"][1] < 1
    assert f"image {kept.parts['image'][1]:.0%} of 120, other" in kept.by_part

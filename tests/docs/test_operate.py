"""docs/operate.md's offline example runs as printed."""

import ast
import re
from pathlib import Path

import pytest

import engines
from checkpoints import text_checkpoint

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operate.md").read_text()
(EXAMPLE,) = re.findall(r"^```python\n(from vllm .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.engine
@pytest.mark.parametrize("usage", [True, False])
def test_the_offline_example_reports_what_was_kept(
    usage, demo_model, tmp_path, monkeypatch, capsys
):
    import vllm

    names = {}
    small = dict(enforce_eager=True, dtype="float32", max_model_len=4096, seed=0)
    pool = dict(distributed_executor_backend="uni", num_gpu_blocks_override=200)
    model = text_checkpoint(tmp_path, demo_model)
    engines.replace_kernels_once()
    with monkeypatch.context() as patched:
        whole = vllm.LLM
        patched.setattr(vllm, "LLM", lambda _, **set_: whole(model, **{**set_, **small, **pool}))
        patched.chdir(ROOT)
        assert EXAMPLE.count('"usage": True') == 1
        try:
            exec(EXAMPLE.replace('"usage": True', f'"usage": {usage}'), names)
        finally:
            if "llm" in names:
                names["llm"].llm_engine.engine_core.shutdown()
    (output,) = names["output"].outputs
    assert len(output.token_ids) == 200
    kept = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    if not usage:
        assert kept is None
        return
    assert kept["prompt_tokens"] > 2000
    assert 0.15 < kept["kept_tokens"] / kept["prompt_tokens"] < 0.25

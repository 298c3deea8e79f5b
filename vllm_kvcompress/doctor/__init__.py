"""What ``kvcompress doctor`` runs, except for the checks that need vLLM (`engine.doctor`).

`child_process` starts `engine.doctor` for a model, and `server_probe` sends a prompt to a running
server. `kept` holds and shows the kept tokens of that prompt. `checks` defines a check and a
report. `probe_prompt` computes the prompt length.
"""

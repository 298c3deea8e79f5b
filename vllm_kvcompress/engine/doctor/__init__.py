"""The checks of `kvcompress doctor` that need vLLM; `doctor.child_process` starts `run_checks`.

`installation` checks versions, plugin and hooks. `trial_engine` starts the model and runs a
`trial_prompt`; `kept_recorder` notes the kept tokens, and `trial_outcome` checks the result.
"""

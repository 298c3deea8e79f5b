"""The only package that imports vLLM, with one subpackage for each vLLM component we extend.

`startup` runs once, before a model is loaded. `frontend` runs where requests arrive, `scheduling`
runs in the scheduler, and `worker`, `attention`, `compression` and `pages` run on each worker.
`doctor` runs in `kvcompress doctor`. `messages` defines the data they send to each other.
Imports go from left to right only::

    doctor > startup > frontend, worker > attention > compression > scheduling, pages > messages
"""

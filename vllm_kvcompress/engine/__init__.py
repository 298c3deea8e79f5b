"""The only package that imports vLLM. A room for each place where our code runs there.

`startup` runs once, before a model is loaded; `frontend` where requests are taken; `scheduling` in
the scheduler; `worker`, `attention`, `compression` and `pages` on each worker; `diagnosis` when
`kvcompress doctor` is asked. `messages` is what travels between them. Imports run down this list::

    diagnosis > startup > frontend, worker > attention > compression > scheduling, pages > messages
"""

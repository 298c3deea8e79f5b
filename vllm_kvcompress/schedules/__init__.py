"""When a request is packed, and to how many pages, computed from lengths alone.

A request has one KV footprint and up to three schedules, used in this order
(`request.RequestSchedule`): for its prefill (`prompt`, `pieces` or `groups`), for its
look-ahead (`lookahead`), and for its output (`outputs`).
"""

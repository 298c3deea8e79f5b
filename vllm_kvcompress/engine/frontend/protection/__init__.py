"""Find the prompt tokens of protected chat parts.

A request, or the operator, protects parts of a chat by name. Only the chat template knows where
these parts are:

1. `chat_parts` renders the chat again with a placeholder in one part, and turns the difference of
   the two renderings into token spans.
2. `spans` merges the protected parts and the request's own spans, and checks that they fit the
   budget.

Related modules: `settings.protection` parses the names of parts, `methods.protected` changes the
scores, and `engine.compression.protected_slots` finds the protected tokens in packed pages.
"""

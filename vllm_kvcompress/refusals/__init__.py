"""Rules for what compression refuses, in tables over typed facts, and a list of what was tested.

`settings` has the rules of `CompressionConfig.parse`, and `requests` those of what one request
chooses. The engine and ``kvcompress plan`` gather the facts for `model` and `server`.
docs/compatibility.md lists the rules that have a name.
"""

"""What compression refuses at startup: tables of rules over typed facts, and what was tested.

`settings` has the rules of `CompressionConfig.parse`. The engine and ``kvcompress plan`` gather the
facts for `model` and `server`. docs/compatibility.md lists the rules that have a name.
"""

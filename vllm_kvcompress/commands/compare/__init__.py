"""``kvcompress compare``: `options` declares the flags, `command` runs and prints a comparison."""

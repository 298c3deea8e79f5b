"""Long English text that needs no download: the reference manual of CPython 3.11.7.

The text is stored beside this file, because every Python release ships a different manual and the
prompts must be the same on every machine.
"""

import gzip
from functools import cache
from importlib.resources import files

QUESTION = "What is the text above about? Answer in one sentence."


@cache
def english() -> str:
    """Half a megabyte of the Python language reference."""
    packed = files(__package__).joinpath("manual.txt.gz").read_bytes()
    return gzip.decompress(packed).decode()

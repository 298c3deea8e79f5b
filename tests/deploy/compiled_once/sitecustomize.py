"""Reuse bytecode of the test environment while pip installs packages into an image.

Python runs this file at the start of every process of an image build. Half of pip's time goes into
compiling thousands of modules. The test environment comes from the same lock and has nearly all of
them compiled. If it has a module with the same bytes, its bytecode is valid here except for two
fields: the modification time of the source, which this file sets, and the path, which Python sets
on import.
"""

import compileall
import importlib.util
import os
import struct
from pathlib import Path
from typing import Any

COMPILED = Path(os.environ["COMPILED_ALREADY"])
"""The site-packages folder of an environment with the same Python."""
HEADER = struct.Struct("<4s3L")
"""Magic number, flags, modification time of the source, and size of the source."""
compile_file = compileall.compile_file


def bytecode_of(source: Path) -> bytes | None:
    """Return the test environment's bytecode of a module identical to `source`, or None."""
    relative = str(source).partition("/site-packages/")[2]
    original = COMPILED / relative
    compiled = Path(importlib.util.cache_from_source(str(original)))
    if not relative or not original.is_file() or not compiled.is_file():
        return None
    code = compiled.read_bytes()
    original_stat, source_stat = original.stat(), source.stat()
    header = (importlib.util.MAGIC_NUMBER, 0, int(original_stat.st_mtime), original_stat.st_size)
    if code[: HEADER.size] != HEADER.pack(*header) or original.read_bytes() != source.read_bytes():
        return None
    return (
        HEADER.pack(*header[:2], int(source_stat.st_mtime), source_stat.st_size)
        + code[HEADER.size :]
    )


def compile_once(fullname: Any, *args: Any, **kwargs: Any) -> Any:
    source = Path(fullname)
    code = bytecode_of(source)
    if code is None:
        return compile_file(fullname, *args, **kwargs)
    target = Path(importlib.util.cache_from_source(str(source)))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(code)
    return True


compileall.compile_file = compile_once

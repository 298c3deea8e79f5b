"""Python runs this at the start of every process of an image's build.

Half of what pip does is to compile the thousands of modules that it installs. The suite's own
environment comes from the same lock, and holds nearly all of them compiled already. Where it has a
module of the same bytes, its bytecode is what the compiler would write, but for two things: whose
time of modification it names, which is set here, and which path, which Python sets as it imports.
"""

import compileall
import importlib.util
import os
import struct
from pathlib import Path
from typing import Any

COMPILED = Path(os.environ["COMPILED_ALREADY"])
"""The folder of packages of an environment of this Python."""
HEADER = struct.Struct("<4s3L")
"""Magic number, flags, and of the source the time of modification and the size."""
compile_file = compileall.compile_file


def bytecode_of(source: Path) -> bytes | None:
    """What the other environment has compiled of the same bytes, for `source` as it lies there."""
    inside = str(source).partition("/site-packages/")[2]
    twin = COMPILED / inside
    compiled = Path(importlib.util.cache_from_source(str(twin)))
    if not inside or not twin.is_file() or not compiled.is_file():
        return None
    code = compiled.read_bytes()
    written, own = twin.stat(), source.stat()
    header = (importlib.util.MAGIC_NUMBER, 0, int(written.st_mtime), written.st_size)
    if code[: HEADER.size] != HEADER.pack(*header) or twin.read_bytes() != source.read_bytes():
        return None
    return HEADER.pack(*header[:2], int(own.st_mtime), own.st_size) + code[HEADER.size :]


def compile_once(fullname: Any, *args: Any, **named: Any) -> Any:
    source = Path(fullname)
    code = bytecode_of(source)
    if code is None:
        return compile_file(fullname, *args, **named)
    target = Path(importlib.util.cache_from_source(str(source)))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(code)
    return True


compileall.compile_file = compile_once

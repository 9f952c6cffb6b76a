"""A trace file as text, whatever its packing: gzip and encoding go by content, not by name."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvsim.errors import TraceError

BLOCK_BYTES = 1 << 22
HEAD_BYTES = 1 << 16
GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
LFS = "version https://git-lfs.github.com/spec/"


class Source(NamedTuple):
    """A file to read: `name` as errors show it, `head` its first characters ('' if Parquet)."""

    path: Path
    name: str
    is_gzip: bool
    encoding: str
    head: str
    is_parquet: bool = False


class Lines(NamedTuple):
    """Whole lines of a file without their ends; `first` is the number of the first, from 1."""

    first: int
    lines: list[str]


def open_source(path: str | Path) -> Source:
    """Looks at a file; refuses a folder, an empty file, a web page and a Git LFS pointer."""
    path = Path(path)
    name = path.name
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise TraceError(f"{name}: no such file ({path.parent})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{name[:80]}: cannot be opened: {reason}") from None
    if stat.S_ISDIR(mode):
        raise TraceError(f"{name}: is a folder, not a trace file")
    if not stat.S_ISREG(mode):
        raise TraceError(f"{name}: not a regular file: a trace is read more than once")
    with _opened(path, name) as file:
        start = file.read(4)
    if start.startswith(PARQUET):
        return Source(path, name, False, "", "", is_parquet=True)
    is_gzip = start.startswith(GZIP)
    with _opened(path, name) as file:
        try:
            head = _unpacked(file, is_gzip).read(HEAD_BYTES)
        except (EOFError, zlib.error, OSError) as error:
            raise TraceError(f"{name}: damaged gzip file: {_one_line(error)}") from None
    encoding = next((kind for bom, kind in BOMS.items() if head.startswith(bom)), "utf-8")
    text = codecs.getincrementaldecoder(encoding)("replace").decode(head)
    _refuse_what_is_no_trace(name, text)
    return Source(path, name, is_gzip, encoding, text)


def text_blocks(source: Source, num_bytes: int = BLOCK_BYTES) -> Iterator[str]:
    """The text, piece by piece, with every line end as a line feed."""
    if source.is_parquet:
        raise TraceError(f"{source.name}: a Parquet file, which only format native reads")
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder(source.encoding)(), translate=True
    )
    position = 0
    with _opened(source.path, source.name) as file:
        unpacked = _unpacked(file, source.is_gzip)
        while True:
            try:
                raw = unpacked.read(num_bytes)
                text = decoder.decode(raw, final=not raw)
            except UnicodeError as error:
                at = position + max(getattr(error, "start", 0), 0)
                raise TraceError(f"{source.name}: near byte {at}: not {source.encoding}") from None
            except (EOFError, zlib.error, OSError) as error:
                raise TraceError(
                    f"{source.name}: damaged gzip file: {_one_line(error)}"
                    if source.is_gzip
                    else f"{source.name}: {_one_line(error)}"
                ) from None
            position += len(raw)
            if text:
                yield text
            if not raw:
                return


def line_blocks(source: Source, num_bytes: int = BLOCK_BYTES) -> Iterator[Lines]:
    """The lines, some megabytes at a time."""
    first, rest = 1, ""
    for text in text_blocks(source, num_bytes):
        lines = (rest + text).split("\n")  # not splitlines: U+2028 may stand inside a string
        rest = lines.pop()
        if lines:
            yield Lines(first, lines)
            first += len(lines)
    if rest:
        yield Lines(first, [rest])


def _opened(path: Path, name: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise TraceError(f"{name}: no such file ({path.parent})") from None
    except OSError as error:
        raise TraceError(f"{name}: cannot be opened: {error.strerror}") from None


def _unpacked(file: BinaryIO, is_gzip: bool) -> BinaryIO:
    return gzip.GzipFile(fileobj=file) if is_gzip else file  # type: ignore[return-value]


def _refuse_what_is_no_trace(name: str, head: str) -> None:
    start = head.lstrip()[:300]
    if not start:
        raise TraceError(f"{name}: no requests: the file is empty")
    if start.startswith(LFS):
        size = re.search(r"^size (\d+)", head, re.MULTILINE)
        real = f" of {int(size[1][:18]):,} bytes" if size else ""
        raise TraceError(f"{name}: a Git LFS pointer, not the data{real}: fetch it with git lfs")
    if re.match(r"<(!doctype|html|head|body|\?xml)", start, re.IGNORECASE):
        raise TraceError(f"{name}: not a trace, looks like HTML (an error page saved by mistake?)")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

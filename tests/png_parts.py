"""What a PNG file consists of."""

from __future__ import annotations

import struct
import zlib


def chunks(file: bytes) -> list[tuple[bytes, bytes]]:
    """The parts of a PNG, as (name, data). Their checksums hold, or an assertion fails."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = [], 8
    while at < len(file):
        (length,) = struct.unpack(">I", file[at : at + 4])
        name, data = file[at + 4 : at + 8], file[at + 8 : at + 8 + length]
        assert struct.unpack(">I", file[at + 8 + length : at + 12 + length])[0] == zlib.crc32(name + data)
        found.append((name, data))
        at += 12 + length
    return found


def stream(file: bytes) -> bytes:
    """What its pixels are compressed from: rows behind the number of their filter."""
    packed = zlib.decompressobj()
    data = packed.decompress(b"".join(data for name, data in chunks(file) if name == b"IDAT"))
    assert packed.eof and not packed.unused_data
    return data


def beside(file: bytes) -> list[tuple[bytes, bytes]]:
    """All but its pixels."""
    return [each for each in chunks(file) if each[0] != b"IDAT"]


def same_in_bands(ours: bytes, theirs: bytes) -> None:
    """Assert that two files differ in how their pixels are cut alone: ours in bands, where Pillow writes 64 KB each
    time."""
    assert beside(ours) == beside(theirs)
    assert stream(ours) == stream(theirs)
    bands, pieces = ([data for name, data in chunks(file) if name == b"IDAT"] for file in (ours, theirs))
    assert len(bands) < len(pieces)

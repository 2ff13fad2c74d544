"""A decoder from packed weights where a file has them, else from a checkpoint, whose packed weights are then kept for the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from inference.decoder.weights import DecoderWeights
from inference.native.decoder import NativeDecoder
from inference.native.loader import library_name
from inference.native.packed_file import PackedFile, open_packed, packed_path, trim_packed, write_packed
from inference.native.packed_place import PackedPlace

PACKED_BYTES_MIN = 64 << 20  # of weights in a checkpoint: packing fewer takes less than importing torch varies, and few are private

_log = logging.getLogger("weir.inference.native")


def open_decoder(
    path: Path | None,
    bytes_max: int,
    load: Callable[[], DecoderWeights],
    make: Callable[[DecoderWeights | PackedFile], NativeDecoder],
) -> NativeDecoder:
    """One that reads the file at `path`, which is written if it is not there; with private weights if that fails, or path is None.

    bytes_max: of all files beside it, with it; others go where there are more. load: reads and checks the checkpoint. make: lays
    out a decoder.
    """
    decoder = _open_decoder(path, load, make)
    if path is not None:
        trim_packed(path.parent, bytes_max)
    return decoder


def _open_decoder(
    path: Path | None, load: Callable[[], DecoderWeights], make: Callable[[DecoderWeights | PackedFile], NativeDecoder]
) -> NativeDecoder:
    if path is None:
        return make(load())
    if (file := open_packed(path)) is not None:
        try:
            return make(file)
        except ValueError as error:
            _log.warning("packed weights in %s are not used: %s", path, error)
    decoder = make(load())
    try:
        write_packed(path, decoder.parts())
        if (file := open_packed(path)) is not None:
            decoder.adopt(file)
    except OSError as error:
        _log.warning("packed weights are not kept, each host has its own: %s", error)
    return decoder


def path_for(place: PackedPlace | None, checkpoint: Path, compute_dtype: str) -> Path | None:
    """Where packed weights of a checkpoint belong; None if they are not to be kept, or are too few for it to matter."""
    if place is None:
        return None
    try:
        stored_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        return (
            packed_path(Path(place.directory), checkpoint, compute_dtype, library_name())
            if stored_bytes >= PACKED_BYTES_MIN
            else None
        )
    except OSError as error:
        _log.warning("packed weights are not kept: %s", error)
        return None

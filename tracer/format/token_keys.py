"""What a row is, whatever batch, padding, packing, chunk or rank it came from.

Suffix T: the tokens of one sequence, from position 0 on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["PrefixKeys", "label_keys", "token_keys"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_LABEL_SEED = 5
"""Keeps keys made from labels apart from keys made from ids (digest, sketch and weight sums use seeds 0 to 4)."""


class PrefixKeys:
    """Keys of one sequence while it grows: ``key[t] = xxh3_64`` of the little-endian int64 ids ``0..t``."""

    def __init__(self, salt: str = "") -> None:
        """``salt``: whatever else conditions the sequence (adapter, image digests); its UTF-8 bytes come before the ids."""
        self._state = xxhash.xxh3_64(salt.encode())
        self.keys: list[int] = []

    def extend(self, ids_T: npt.ArrayLike) -> None:
        """The next ids of the sequence, integers (T,). One pass, whatever T is."""
        raw = memoryview(np.ascontiguousarray(ids_T, dtype="<i8").tobytes())
        update, digest, keys = self._state.update, self._state.intdigest, self.keys
        for start in range(0, len(raw), 8):
            update(raw[start : start + 8])
            keys.append(digest())


def token_keys(ids_T: npt.ArrayLike, salt: str = "") -> U64:
    """Key of every token of one sequence, as ``PrefixKeys`` has them. ``ids_T``: from position 0 on, (T,). Returns uint64 (T,)."""
    prefix = PrefixKeys(salt)
    prefix.extend(ids_T)
    return np.array(prefix.keys, dtype=np.uint64)


def label_keys(name: str, positions_R: npt.ArrayLike) -> U64:
    """Keys of tokens whose ids are unknown: they match only under the same name and position.

    ``name``: request id or sequence label. ``positions_R``: integer positions, (R,), in any order. Returns uint64 (R,),
    never meant to equal a key of ``token_keys``.
    """
    prefix = name.encode() + b"\0"
    raw = np.ascontiguousarray(positions_R, dtype="<i8").reshape(-1).tobytes()
    digest = xxhash.xxh3_64_intdigest
    return np.array([digest(prefix + raw[i : i + 8], seed=_LABEL_SEED) for i in range(0, len(raw), 8)], dtype=np.uint64)

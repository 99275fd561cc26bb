"""What every row of a forward is: sequences, positions, documents, and how far back a row may look.

``SequenceRegistry`` holds the sequences of the run and their token ids. The functions turn what a model
is given (mask, positions, cu_seqlens, cached prefix lengths) into ``Rows``. They hold no policy: which of
them applies to a call, and when a mask separates packed documents, is the host's knowledge.

Shape suffixes: B batch rows, S columns of this call, K key columns (cached ones first, then this call's),
N = B * S flattened rows, D documents. A document is the part of one sequence that this call holds;
documents are numbered from 0 in flattened order, -1 is padding. All arrays are int64.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracer.errors import CaptureError, Code, UsageError
from tracer.format import schema
from tracer.format.token_keys import PrefixKeys
from tracer.record.host import IntArray, Rows

__all__ = [
    "DocumentLengths",
    "SequenceRegistry",
    "check_text",
    "document_rows",
    "documents_from_cu_seqlens",
    "documents_from_lengths",
    "documents_from_mask",
    "documents_from_positions",
    "first_columns",
    "label_rows",
    "offsets_in_documents",
    "read_lengths",
    "read_request_names",
    "visible_from",
    "visible_keys",
]

BoolArray = npt.NDArray[np.bool_]
DocumentLengths = Sequence[Sequence[int]]
"""Per batch row the lengths of its documents, in order."""


def read_lengths(given: object) -> DocumentLengths:
    """The user's ``sequences=`` as document lengths: cu_seqlens of one packed row (whole numbers), or per batch row the
    lengths of its documents. Raises UsageError (bad-argument) for anything else."""
    try:
        items = list(given)  # type: ignore[call-overload]
        flat = all(np.ndim(item) == 0 and not isinstance(item, str) for item in items)
        rows = [[operator.index(number) for number in row] for row in ([items] if flat else items)]
    except (TypeError, ValueError):
        rows, flat = [], False
    if flat and rows[0][0:1] == [0] and rows[0] == sorted(rows[0]):
        return [np.diff(rows[0]).tolist()]
    if flat or not rows or any(length < 0 for row in rows for length in row):
        raise UsageError(
            Code.BAD_ARGUMENT,
            "sequences= does not say where documents begin",
            expected="cu_seqlens of one packed row, ascending from 0: [0, 7, 12]; or per batch row the lengths of its documents: [[7, 5]]",
            found=repr(given)[:200],
        )
    return rows


def check_text(text: str, what: str) -> None:
    """Raises UsageError (bad-argument) for text that no file can hold: half of a character, as a wrong decoding leaves it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        found = ascii(text)
        raise UsageError(Code.BAD_ARGUMENT, f"{what} holds half a character", expected="text that UTF-8 can hold", found=found) from None


def read_request_names(names: object) -> list[str]:
    """What ``t.requests`` was given, as a list. Raises UsageError (bad-argument) for anything but strings, for one that
    no file can hold, and for a name given twice: it would say of two sequences that they are one request."""
    told = None if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if told is None or not all(isinstance(name, str) for name in told):
        raise UsageError(
            Code.BAD_ARGUMENT,
            "t.requests takes one name per sequence",
            expected='a list of strings, "" for a sequence without a name',
            found=repr(names if told is None else told)[:200],
        )
    for name in told:
        check_text(name, "a name given to t.requests")
    twice = [name for name, count in Counter(told).items() if name and count > 1]
    if twice:
        raise UsageError(
            Code.BAD_ARGUMENT,
            "t.requests was given a name twice",
            expected="every sequence of a forward under a name of its own",
            found=", ".join(twice[:8]),
            remedy="number the samples of one prompt: p0-s0, p0-s1",
        )
    return told


def documents_from_mask(mask_BS: npt.ArrayLike) -> IntArray:
    """One document per batch row: (N,), -1 where the mask is zero, on either side or in between.

    Batch rows without a real token get no document."""
    real_BS = np.asarray(mask_BS) != 0
    number_B = np.cumsum(real_BS.any(axis=1)) - 1
    return np.where(real_BS, number_B[:, None], -1).astype(np.int64).reshape(-1)


def documents_from_positions(position_BS: npt.ArrayLike, mask_BS: npt.ArrayLike | None = None) -> IntArray:
    """Documents of packed rows: (N,). One begins at every real column whose position is 0, and at the first
    real column of every batch row; a position that jumps or repeats elsewhere begins none."""
    position_BS = np.asarray(position_BS)
    real_BS = np.ones(position_BS.shape, bool) if mask_BS is None else np.asarray(mask_BS) != 0
    first_BS = real_BS & (np.cumsum(real_BS, axis=1) == 1)
    start_BS = first_BS | (real_BS & (position_BS == 0))
    number_N = np.cumsum(start_BS.reshape(-1)) - 1
    return np.where(real_BS.reshape(-1), number_N, -1).astype(np.int64)


def documents_from_cu_seqlens(cu_seqlens: npt.ArrayLike, rows: int) -> IntArray:
    """Documents of ``rows`` packed rows: (N,). Document d lies at ``cu_seqlens[d]:cu_seqlens[d + 1]``;
    empty ones get no number, rows behind the last boundary are padding."""
    boundary = np.asarray(cu_seqlens, dtype=np.int64).reshape(-1)
    length_D = np.diff(boundary)
    if len(boundary) == 0 or boundary[0] != 0 or boundary[-1] > rows or (length_D < 0).any():
        raise CaptureError(
            Code.BAD_ARGUMENT,
            "cu_seqlens do not fit the packed rows",
            expected=f"ascending from 0 to at most {rows}",
            found=str(boundary.tolist()),
        )
    return documents_from_lengths([length_D.tolist()], rows)


def documents_from_lengths(lengths_B: DocumentLengths, columns: int, mask_BS: npt.ArrayLike | None = None) -> IntArray:
    """Documents of packed batch rows: (B * columns,). ``lengths_B``: per batch row the lengths of its documents, in
    order; empty ones get no number, columns behind the last are padding, and so are those where the mask is zero."""
    document_BS = np.full((len(lengths_B), columns), -1, np.int64)
    real_BS = np.ones(document_BS.shape, bool) if mask_BS is None else np.asarray(mask_BS) != 0
    number = 0
    for row_S, real_S, lengths in zip(document_BS, real_BS, lengths_B, strict=True):
        kept = [length for length in lengths if length > 0]
        column_T = np.flatnonzero(real_S)
        if sum(kept) > len(column_T) or any(length < 0 for length in lengths):
            raise CaptureError(
                Code.BAD_ARGUMENT,
                "document lengths do not fit the batch row",
                expected=f"at most {len(column_T)} tokens",
                found=str(list(lengths)),
            )
        row_S[column_T[: sum(kept)]] = number + np.repeat(np.arange(len(kept)), kept)
        number += len(kept)
    return document_BS.reshape(-1)


def document_rows(document_N: IntArray, columns: int) -> IntArray:
    """Batch row of every document: (D,)."""
    return first_columns(document_N) // max(columns, 1)


def first_columns(document_N: IntArray) -> IntArray:
    """Flattened row where every document begins: (D,)."""
    numbers, first = np.unique(document_N, return_index=True)
    return first[numbers >= 0].astype(np.int64)


def offsets_in_documents(document_N: IntArray) -> IntArray:
    """How many rows of the same document come before each row: (N,), 0 for padding."""
    order_N = np.argsort(document_N, kind="stable")
    sorted_N = document_N[order_N]
    run_start_N = np.searchsorted(sorted_N, sorted_N)
    offset_N = np.empty_like(document_N)
    offset_N[order_N] = np.arange(len(document_N)) - run_start_N
    offset_N[document_N < 0] = 0
    return offset_N


def label_rows(document_N: IntArray, sequence_D: npt.ArrayLike, start_D: npt.ArrayLike | None = None) -> Rows:
    """Rows of documents: document d is sequence ``sequence_D[d]`` from position ``start_D[d]`` on (0 if not given;
    the tokens already in its cache otherwise)."""
    sequence_D = np.asarray(sequence_D, np.int64).reshape(-1)
    real_N = document_N >= 0
    safe_N = np.where(real_N, document_N, 0)
    if len(sequence_D) == 0:
        blank_N = np.full(len(document_N), -1, np.int64)
        return Rows(blank_N, np.zeros_like(blank_N))
    position_N = offsets_in_documents(document_N)
    if start_D is not None:
        position_N = position_N + np.asarray(start_D, np.int64).reshape(-1)[safe_N]
    return Rows(np.where(real_N, sequence_D[safe_N], -1), np.where(real_N, position_N, 0))


def visible_keys(mask: npt.ArrayLike, columns: int) -> IntArray:
    """Real tokens from the first one that a row may attend to up to the row itself: (B, S) with S = ``columns``.

    ``mask``: (B, K), non-zero for real tokens (the causal limit is implied), or (B, S, K), non-zero where row s may
    attend to key k; there a key that no row of the batch row attends to counts as padding, and attention beyond the
    row itself is ignored. The last ``columns`` keys are this call's. Rows that see nothing get 0."""
    allowed = np.asarray(mask) != 0
    before = allowed.shape[-1] - columns
    if allowed.ndim == 2:
        counted_BK: IntArray = np.cumsum(allowed, axis=1, dtype=np.int64)
        return counted_BK[:, before:]
    real_B1K = allowed.any(axis=1, keepdims=True)
    causal_SK = np.arange(allowed.shape[-1])[None, :] <= before + np.arange(columns)[:, None]
    seen_BSK = allowed & causal_SK
    from_first_BSK = np.maximum.accumulate(seen_BSK, axis=-1)
    counted_BS: IntArray = (from_first_BSK & real_B1K & causal_SK).sum(axis=-1, dtype=np.int64)
    return counted_BS


def visible_from(rows: Rows, visible_N: npt.ArrayLike) -> IntArray:
    """First position of its own sequence that every row may attend to: (N,). Negative by the number of tokens before
    its own first one that a row sees (packed documents under a mask that does not separate them), also for cached
    steps later on: ``visible_N`` counts all visible tokens, from ``visible_keys``. 0 for padding."""
    visible_N = np.asarray(visible_N, np.int64).reshape(-1)
    from_N: IntArray = np.where(rows.sequence_N >= 0, rows.position_N + 1 - visible_N, 0)
    return from_N


@dataclass
class _Known:
    """Token ids of one sequence, as far as known; capacity doubles."""

    id_T: IntArray = field(default_factory=lambda: np.zeros(64, np.int64))
    known_T: BoolArray = field(default_factory=lambda: np.zeros(64, bool))

    def reserve(self, length: int) -> None:
        if length > len(self.id_T):
            grown = max(length, 2 * len(self.id_T)) - len(self.id_T)
            self.id_T = np.concatenate([self.id_T, np.zeros(grown, np.int64)])
            self.known_T = np.concatenate([self.known_T, np.zeros(grown, bool)])


class SequenceRegistry:
    """The sequences of one run in this process: labels, the user's names for them, and their token ids.

    ``on_open(sequence)`` and ``on_ids(sequence, position, ids)`` hear of everything new, once."""

    def __init__(
        self,
        on_open: Callable[[schema.Sequence], None] = lambda sequence: None,
        on_ids: Callable[[int, int, IntArray], None] = lambda sequence, position, ids: None,
    ) -> None:
        self._on_open = on_open
        self._on_ids = on_ids
        self._index: dict[tuple[str, str], int] = {}
        self._sequences: list[schema.Sequence] = []
        self._known: list[_Known] = []
        self._keys: dict[int, PrefixKeys] = {}
        self._requests: list[str] = []
        self._lengths: DocumentLengths | None = None
        self.notes: list[schema.Note] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence: int) -> schema.Sequence:
        return self._sequences[sequence]

    def open(self, label: str, *, request: str = "", scope: str = "", salt: str = "", start: int = 0, row: str = "") -> int:
        """Index of the sequence with this label and scope; opened if new, else the other arguments are ignored."""
        index = self._index.setdefault((label, scope), len(self._sequences))
        if index == len(self._sequences):
            sequence = schema.Sequence(label=label, request=request, scope=scope, salt=salt, start=start, row=row)
            self._sequences.append(sequence)
            self._known.append(_Known())
            self._on_open(sequence)
        return index

    def index(self, label: str, scope: str = "") -> int | None:
        """Index of the sequence with exactly this label and scope, None if it was never opened."""
        return self._index.get((label, scope))

    def find(self, name: str) -> int | None:
        """Latest sequence with this request name or label, None if there is none."""
        for index in range(len(self._sequences) - 1, -1, -1):
            if name in (self._sequences[index].request, self._sequences[index].label):
                return index
        return None

    def record_ids(self, sequence: int, position: int, ids: npt.ArrayLike) -> None:
        """Token ids of ``sequence`` from ``position`` on; what is known already may be repeated.

        Raises CaptureError (capture-failed) where a known token is given another id: the label was used for two sequences."""
        id_T = np.asarray(ids, np.int64).reshape(-1)
        if len(id_T) == 0:
            return
        known = self._known[sequence]
        stop = position + len(id_T)
        known.reserve(stop)
        repeated_T = known.known_T[position:stop]
        if repeated_T.any():
            differs_T = repeated_T & (known.id_T[position:stop] != id_T)
            if differs_T.any():
                at = int(np.argmax(differs_T))
                raise CaptureError(
                    Code.CAPTURE_FAILED,
                    "two token ids for one position of a sequence",
                    where=f"sequence {self._sequences[sequence].label!r}, position {position + at}",
                    expected=str(known.id_T[position + at]),
                    found=str(id_T[at]),
                )
            if repeated_T.all():
                return
        edges = np.flatnonzero(np.diff(np.concatenate([[True], repeated_T, [True]]).astype(np.int8)))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            self._on_ids(sequence, position + start, id_T[start:end].copy())
        known.id_T[position:stop] = id_T
        known.known_T[position:stop] = True

    def record_rows(self, rows: Rows, ids_N: npt.ArrayLike) -> None:
        """Token ids of all rows of a forward that belong to a sequence."""
        id_N = np.asarray(ids_N, np.int64).reshape(-1)
        kept_N = np.flatnonzero(rows.sequence_N >= 0)
        if len(kept_N) == 0:
            return
        order_N = kept_N[np.lexsort((rows.position_N[kept_N], rows.sequence_N[kept_N]))]
        sequence_N, position_N, id_N = rows.sequence_N[order_N], rows.position_N[order_N], id_N[order_N]
        breaks = np.flatnonzero((np.diff(sequence_N) != 0) | (np.diff(position_N) != 1)) + 1
        starts = [0, *breaks.tolist()]
        for start, stop in zip(starts, [*starts[1:], len(id_N)], strict=True):
            self.record_ids(int(sequence_N[start]), int(position_N[start]), id_N[start:stop])

    def length(self, sequence: int) -> int:
        """Tokens of a sequence up to the last one whose id is known; 0 where none is."""
        return int(np.flatnonzero(self._known[sequence].known_T).max(initial=-1)) + 1

    def look_up(self, sequence_N: IntArray, position_N: IntArray) -> tuple[IntArray, BoolArray]:
        """Token ids at (sequence, position) and whether they are known: both (N,)."""
        id_N = np.zeros(len(sequence_N), np.int64)
        known_N = np.zeros(len(sequence_N), bool)
        for sequence in np.unique(sequence_N[sequence_N >= 0]).tolist():
            known = self._known[sequence]
            here = np.flatnonzero((sequence_N == sequence) & (position_N >= 0) & (position_N < len(known.id_T)))
            id_N[here] = known.id_T[position_N[here]]
            known_N[here] = known.known_T[position_N[here]]
        return id_N, known_N

    def keys(self, sequence_N: IntArray, position_N: IntArray) -> tuple[npt.NDArray[np.uint64], BoolArray]:
        """Token keys at (sequence, position), and whether every id up to there is known: both (N,)."""
        key_N, known_N = np.zeros(len(sequence_N), np.uint64), np.zeros(len(sequence_N), bool)
        for sequence in np.unique(sequence_N[sequence_N >= 0]).tolist():
            here = np.flatnonzero(sequence_N == sequence)
            known = self._known[sequence]
            prefix = self._keys.setdefault(sequence, PrefixKeys(self._sequences[sequence].salt))
            start, stop = len(prefix.keys), min(int(position_N[here].max()) + 1, len(known.id_T))
            unknown = np.flatnonzero(~known.known_T[start:stop])
            prefix.extend(known.id_T[start : start + int(unknown[0]) if len(unknown) else max(stop, start)])
            here = here[(position_N[here] >= 0) & (position_N[here] < len(prefix.keys))]
            key_N[here] = [prefix.keys[position] for position in position_N[here].tolist()]
            known_N[here] = True
        return key_N, known_N

    def name_requests(self, names: Iterable[str]) -> None:
        """Names for the sequences of the next forward, in batch order. Names that no forward took are noted and replaced.

        Raises UsageError (bad-argument): see ``read_request_names``."""
        told = read_request_names(names)
        if self._requests:
            text = f"the request names {', '.join(self._requests[:8])} were replaced before a forward took them"
            self.notes.append(schema.Note(code="requests-replaced", text=text))
        self._requests = told

    def take_requests(self, n: int) -> list[str]:
        """Names given for the next forward's ``n`` sequences, "" where none; they are used up. Where their number is
        another, which name is whose cannot be told: none is used, and a note says so."""
        names, self._requests = self._requests, []
        if names and len(names) != n:
            text = f"{len(names)} request names were given for a forward of {n} sequences: none was used"
            self.notes.append(schema.Note(code="requests-mismatch", text=text))
        return names if len(names) == n else [""] * n

    def take_first_requests(self, n: int) -> list[str]:
        """Names for ``n`` sequences that an engine takes up now, "" where none are left; the other names wait."""
        names, self._requests = self._requests[:n], self._requests[n:]
        return [*names, *[""] * (n - len(names))]

    def unused_requests(self) -> list[str]:
        """Names that no forward has taken yet."""
        return self._requests

    def give_lengths(self, lengths: object) -> None:
        """The user's ``sequences=`` for the coming forwards, None where they say nothing. Raises UsageError (bad-argument):
        see ``read_lengths``."""
        self._lengths = None if lengths is None else read_lengths(lengths)

    def document_lengths(self, token_BS: npt.ArrayLike) -> DocumentLengths | None:
        """Document lengths per batch row as the user gave them, None if they gave none. ``token_BS``: which columns are
        real tokens, not padding; the documents of a batch row hold all of them.

        Raises UsageError (bad-argument) where they speak of other rows or of another number of tokens."""
        if self._lengths is None:
            return None
        token_B = np.asarray(token_BS).sum(axis=1, dtype=np.int64).tolist()
        if len(self._lengths) != len(token_B):
            raise UsageError(
                Code.BAD_ARGUMENT,
                "sequences= does not fit the batch",
                expected=f"documents of {len(token_B)} batch rows",
                found=f"documents of {len(self._lengths)}",
                remedy="give cu_seqlens for one packed row, or one list of document lengths per batch row",
            )
        for b, (lengths, tokens) in enumerate(zip(self._lengths, token_B, strict=True)):
            if sum(lengths) != tokens:
                raise UsageError(
                    Code.BAD_ARGUMENT,
                    "sequences= does not fit the batch",
                    where=f"batch row {b}",
                    expected=f"documents of {tokens} tokens in all",
                    found=f"{' + '.join(map(str, lengths)) or 'none'} = {sum(lengths)}",
                    remedy="give every token a document; mask padding with attention_mask, or count it as a document of its own",
                )
        return self._lengths

"""Which token of one side is which token of the other, and where paired sequences part.

Equal keys are equal prefixes, so they match first. What is left is explained before it is called unmatched: the
sequences it belongs to are paired by name, else by longest common prefix, else by equal ids at another offset,
and the first position where a pair parts is the difference.

Shape suffixes: K tokens of a trace, T positions of one sequence.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tracer.format.schema import RowScope
from tracer.read.logical import LogicalSequence, LogicalTrace, TokenTable

__all__ = ["IDS", "MASK", "POSITIONS", "Pairing", "Parting", "TokenMatch", "mask_unseen", "pair_sides"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

IDS = "input.ids"
POSITIONS = "input.positions"
MASK = "input.visible_from"
"""What tells of every row which tokens it may attend to."""
_SAME_NAME_SHARE = 0.5
"""Sequences of one label whose first tokens differ are one sequence only if this share of their ids is equal."""
_OFFSET_TOKENS = 2
"""Fewest ids that must be equal at another offset to be called the same document."""


@dataclass(frozen=True)
class TokenMatch:
    """The same token on both sides. ``b_of_a``: (K_A,) int64 index into B's table, -1 where B has no such token;
    ``a_of_b``: the reverse. ``identity``: both tables hold the same tokens in the same order."""

    b_of_a: I64
    a_of_b: I64
    identity: bool


@dataclass(frozen=True)
class Parting:
    """The first position where two paired sequences are no longer fed the same.

    ``boundary``: ``input.ids`` or ``input.positions``. ``sequence_a``, ``sequence_b``: indices into the traces'
    sequences; ``position_a``, ``position_b``: index of the parting token in them. ``value_a``, ``value_b``: what
    each was fed there, None where the sequence has ended. ``behind_a``, ``behind_b``: token indices from there on."""

    boundary: str
    sequence_a: int
    sequence_b: int
    position_a: int
    position_b: int
    value_a: int | None
    value_b: int | None
    behind_a: I64
    behind_b: I64
    text: str


@dataclass(frozen=True)
class Pairing:
    """Everything about which rows can be compared. ``only_a``, ``only_b``: token indices without any partner and
    without an explanation. ``declared_a``: reason -> tokens of A that B declares never computed, and the reverse.
    ``fed_a``, ``fed_b``: (K,) tokens that went through the model, and are not only spoken of by rows about the next token."""

    tokens: TokenMatch
    partings: tuple[Parting, ...]
    only_a: I64
    only_b: I64
    declared_a: Mapping[str, I64]
    declared_b: Mapping[str, I64]
    fed_a: Mask
    fed_b: Mask
    by_label: int = 0
    """Tokens matched by sequence name and position because one side does not know the ids."""
    assumed_K: Mask | None = None
    """(K_A,) matched tokens that nothing but labels of the host's own pairs: ids, or what came before, are unknown, and no
    user named the request. None where there are none."""
    asserted: int = 0
    """Tokens of the same kind whose requests the user named on both sides: taken to be fed the same."""

    @property
    def matched(self) -> int:
        """Number of tokens that went through the model on both sides."""
        return int(np.count_nonzero(self.fed_a & _at(self.fed_b, self.tokens.b_of_a)))


def pair_sides(a: LogicalTrace, b: LogicalTrace) -> Pairing:
    """Match the tokens of two traces, and explain those that do not match."""
    b_of_a = _match_keys(a.tokens.key_K, b.tokens.key_K)
    by_label = _match_labelled(a, b, b_of_a)
    a_of_b = _inverse(b_of_a, len(b.tokens))
    identity = len(b_of_a) == len(a_of_b) and np.array_equal(b_of_a, np.arange(len(b_of_a)))
    fed_a, fed_b = _fed_tokens(a), _fed_tokens(b)
    open_a, open_b = fed_a & ~_at(fed_b, b_of_a), fed_b & ~_at(fed_a, a_of_b)
    declared_a = _declared(a.tokens, open_a, b)
    declared_b = _declared(b.tokens, open_b, a)
    partings: tuple[Parting, ...] = ()
    if open_a.any() and open_b.any():
        partings = tuple(_partings(a, b, open_a, open_b, b_of_a, a_of_b))
        for parting in partings:
            open_a[parting.behind_a] = False
            open_b[parting.behind_b] = False
    tokens = TokenMatch(b_of_a, a_of_b, bool(identity))
    only_a, only_b = np.flatnonzero(open_a), np.flatnonzero(open_b)
    return Pairing(tokens, partings, only_a, only_b, declared_a, declared_b, fed_a, fed_b, by_label, *_assumed(a, b, b_of_a))


def mask_unseen(a: LogicalTrace, b: LogicalTrace, pairing: Pairing) -> str:
    """``mask not seen on A``, where a side does not tell of every token which ones it may attend to; empty where both do."""
    sides = []
    for side, trace, fed_K in (("A", a, pairing.fed_a), ("B", b, pairing.fed_b)):
        told = trace.boundaries.get(MASK)
        told_K = np.zeros(len(fed_K), np.bool_)
        if told is not None:
            told_K[told.token_R] = True
        if (fed_K & ~told_K).any():
            sides.append(side)
    return f"mask not seen on {' and '.join(sides)}" if sides else ""


def _fed_tokens(trace: LogicalTrace) -> Mask:
    fed = np.zeros(len(trace.tokens), np.bool_)
    for boundary in trace.boundaries.values():
        if boundary.info.rows is not RowScope.NEXT:
            fed[boundary.token_R] = True
            if fed.all():
                break
    return fed


def _at(mask: Mask, index: I64) -> Mask:
    """``mask[index]``, False where the index is -1."""
    if not len(mask):
        return np.zeros(len(index), np.bool_)
    found: Mask = mask[index] & (index >= 0)
    return found


def _match_keys(key_a: U64, key_b: U64) -> I64:
    if len(key_a) == len(key_b) and np.array_equal(key_a, key_b):
        return np.arange(len(key_a), dtype=np.int64)
    if not len(key_b):
        return np.full(len(key_a), -1, dtype=np.int64)
    order = np.argsort(key_b, kind="stable")
    sorted_b = key_b[order]
    at = np.minimum(np.searchsorted(sorted_b, key_a), len(key_b) - 1)
    return np.where(sorted_b[at] == key_a, order[at], -1).astype(np.int64)


def _inverse(b_of_a: I64, size: int) -> I64:
    a_of_b = np.full(size, -1, dtype=np.int64)
    hit = np.flatnonzero(b_of_a >= 0)
    a_of_b[b_of_a[hit]] = hit
    return a_of_b


def _match_labelled(a: LogicalTrace, b: LogicalTrace, b_of_a: I64) -> int:
    """Match by name and position where one side knows the ids and the other does not; writes into ``b_of_a``."""
    if not (a.tokens.labelled_K.any() or b.tokens.labelled_K.any()):
        return 0
    names_b = _unique_names(b.sequences)
    free_b = np.ones(len(b.tokens), dtype=bool)
    free_b[b_of_a[b_of_a >= 0]] = False
    found = 0
    for name, i in _unique_names(a.sequences).items():
        if name not in names_b:
            continue
        token_a, token_b = a.sequences[i].token, b.sequences[names_b[name]].token
        shared = min(len(token_a), len(token_b))
        ta, tb = token_a[:shared], token_b[:shared]
        both = (ta >= 0) & (tb >= 0)
        ta, tb = ta[both], tb[both]
        unmatched = (b_of_a[ta] < 0) & free_b[tb] & (a.tokens.labelled_K[ta] != b.tokens.labelled_K[tb])
        b_of_a[ta[unmatched]] = tb[unmatched]
        free_b[tb[unmatched]] = False
        found += int(np.count_nonzero(unmatched))
    return found


def _assumed(a: LogicalTrace, b: LogicalTrace, b_of_a: I64) -> tuple[Mask | None, int]:
    """Which matched tokens of A rest on labels that no user gave (``f0.r0.d0`` says where a row stood, not what it was fed), and
    how many on names that one did."""
    if not (a.tokens.labelled_K.any() or b.tokens.labelled_K.any()):
        return None, 0
    token_a = np.flatnonzero(b_of_a >= 0)
    token_a = token_a[a.tokens.labelled_K[token_a] | b.tokens.labelled_K[b_of_a[token_a]]]
    named = [np.array([bool(sequence.request) for sequence in trace.sequences], np.bool_) for trace in (a, b)]
    told = named[0][a.tokens.sequence_K[token_a]] & named[1][b.tokens.sequence_K[b_of_a[token_a]]]
    assumed_K = np.zeros(len(a.tokens), np.bool_)
    assumed_K[token_a[~told]] = True
    return assumed_K if assumed_K.any() else None, int(np.count_nonzero(told))


def _unique_names(sequences: Sequence[LogicalSequence]) -> dict[str, int]:
    """Name -> index, for names that only one sequence has."""
    times = Counter(sequence.name for sequence in sequences)
    return {sequence.name: i for i, sequence in enumerate(sequences) if times[sequence.name] == 1}


def _declared(tokens: TokenTable, open_K: Mask, other: LogicalTrace) -> dict[str, I64]:
    """Tokens that the other side declares never computed at all, by reason; closes them in ``open_K``."""
    declared: dict[str, I64] = {}
    for reason, by_boundary in sorted(other.not_computed.items()):
        keys = by_boundary.get("")
        if keys is None or not open_K.any():
            continue
        hit = np.flatnonzero(open_K & np.isin(tokens.key_K, keys))
        if len(hit):
            declared[reason] = hit
            open_K[hit] = False
    return declared


# ---------------------------------------------------------------- sequences


@dataclass(frozen=True)
class _Tail:
    """What is left of one sequence: rows from ``start`` on that match nothing."""

    index: int
    start: int


def _partings(a: LogicalTrace, b: LogicalTrace, open_a: Mask, open_b: Mask, b_of_a: I64, a_of_b: I64) -> Iterator[Parting]:
    twins, left_a, left_b = _twins(a.sequences, b.sequences)
    parted: list[Parting] = []
    for i, j in twins + _paired(a.sequences, b.sequences, left_a, left_b):
        parting = _part(a.sequences[i], b.sequences[j], i, j, open_a, open_b)
        if parting is not None:
            parted.append(parting)
    still_a, still_b = open_a.copy(), open_b.copy()
    for parting in parted:
        still_a[parting.behind_a] = False
        still_b[parting.behind_b] = False
    parted += _at_another_offset(a, b, still_a, still_b, b_of_a, a_of_b)
    return iter(sorted(parted, key=lambda parting: (parting.sequence_a, parting.position_a)))


def _twins(a: Sequence[LogicalSequence], b: Sequence[LogicalSequence]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Pairs of sequences of exactly the same ids, one for one, and the sequences of each side that have no such twin."""
    waiting: dict[bytes, list[int]] = defaultdict(list)
    for j, sequence in enumerate(b):
        if len(sequence.ids):
            waiting[sequence.ids.tobytes()].append(j)
    twins, left_a, taken = [], [], set()
    for i, sequence in enumerate(a):
        if not len(sequence.ids):
            continue
        equal = waiting.get(sequence.ids.tobytes())
        if equal:
            same_name = next((j for j in equal if b[j].name == sequence.name), equal[0])
            equal.remove(same_name)
            taken.add(same_name)
            twins.append((i, same_name))
        else:
            left_a.append(i)
    return twins, left_a, [j for j, sequence in enumerate(b) if len(sequence.ids) and j not in taken]


def _paired(
    a: Sequence[LogicalSequence], b: Sequence[LogicalSequence], left_a: Iterable[int], left_b: Iterable[int]
) -> list[tuple[int, int]]:
    """Pair sequences one for one: by request, by label where the ids support it, by longest common prefix.

    Where several sequences could be one (beams of a request, forks of a prompt), the one that goes along furthest is. A
    sequence whose best partner is taken is left over: paired with another it would part where its side merely left a beam.
    """
    rest_a, rest_b = dict.fromkeys(left_a), dict.fromkeys(left_b)
    all_a, all_b = _Prefixes(a), _Prefixes(b)
    pairs: list[tuple[int, int]] = []

    def take(i: int, j: int) -> None:
        pairs.append((i, j))
        del rest_a[i], rest_b[j]

    requests_a, requests_b = _by_request(a), _by_request(b)
    for request in [name for name in requests_a if name in requests_b]:
        beams_a, beams_b = ([at for at in own[request] if at in rest] for own, rest in ((requests_a, rest_a), (requests_b, rest_b)))
        alone = len(beams_a) == len(beams_b) == 1 and len(requests_a[request]) == len(requests_b[request])
        for i, j in list(zip(beams_a, beams_b, strict=True)) if alone else list(_by_prefix(a, b, beams_a, beams_b)):
            take(i, j)
        for beams, rest in ((beams_a, rest_a), (beams_b, rest_b)):
            for at in beams:
                rest.pop(at, None)  # a beam of a request that the other side has is nobody else's partner
    waiting_a, waiting_b = _Prefixes(a, rest_a), _Prefixes(b, rest_b)
    labels_b: dict[str, list[int]] = defaultdict(list)
    for j in rest_b:
        labels_b[b[j].label].append(j)
    for i in list(rest_a):
        for j in labels_b.get(a[i].label, ()) if a[i].label else ():
            if j in rest_b and _same_by_ids(a[i].ids, b[j].ids):
                along = _common_prefix(a[i].ids, b[j].ids)
                if max(waiting_b.longest(a[i].ids), waiting_a.longest(b[j].ids)) <= along:
                    take(i, j)
                    break
    for i, j in list(_by_prefix(a, b, list(rest_a), list(rest_b))):
        if max(all_b.longest(a[i].ids), all_a.longest(b[j].ids)) <= _common_prefix(a[i].ids, b[j].ids):
            take(i, j)
    return pairs


def _by_request(sequences: Sequence[LogicalSequence]) -> dict[str, list[int]]:
    """Request -> sequences of that name, in order; those without a name apart."""
    found: dict[str, list[int]] = {}
    for index, sequence in enumerate(sequences):
        if sequence.request and len(sequence.ids):
            found.setdefault(sequence.request, []).append(index)
    return found


class _Prefixes:
    """Some sequences of one side, to ask how far any of them goes along with others' ids."""

    def __init__(self, sequences: Sequence[LogicalSequence], chosen: Iterable[int] | None = None) -> None:
        ids = [sequences[index].ids for index in (range(len(sequences)) if chosen is None else chosen)]
        self._sorted = sorted(((_sortable(own), own) for own in ids if len(own)), key=lambda entry: entry[0])
        self._keys = [key for key, _ in self._sorted]

    def longest(self, ids: I64) -> int:
        """Most ids from the start that any of the sequences shares with these: its neighbours in sorted order have them."""
        at = bisect.bisect_left(self._keys, _sortable(ids))
        return max((_common_prefix(ids, own) for _, own in self._sorted[max(0, at - 1) : at + 1]), default=0)


def _same_by_ids(ids_a: I64, ids_b: I64) -> bool:
    """Whether two sequences of one label are plausibly one: labels such as ``0`` are given without looking at the ids."""
    shared = min(len(ids_a), len(ids_b))
    return bool(shared) and float(np.mean(ids_a[:shared] == ids_b[:shared])) >= _SAME_NAME_SHARE


def _sortable(ids: I64) -> bytes:
    """Ids as bytes that sort as they do, prefix before the longer."""
    return ids.astype(">i8").tobytes()


def _common_prefix(ids_a: I64, ids_b: I64) -> int:
    shared = min(len(ids_a), len(ids_b))
    apart = np.flatnonzero(ids_a[:shared] != ids_b[:shared])
    return int(apart[0]) if len(apart) else shared


def _by_prefix(
    a: Sequence[LogicalSequence], b: Sequence[LogicalSequence], left_a: list[int], left_b: list[int]
) -> Iterator[tuple[int, int]]:
    """Greedily, longest common prefix first; pairs that share nothing stay apart.

    In the sorted list of all sequences the best pair is always adjacent, and taking it out leaves its neighbours
    with the shorter of their two prefixes: O(n log n) in the number of sequences.
    """
    entries = sorted([(_sortable(a[i].ids), 0, i) for i in left_a] + [(_sortable(b[j].ids), 1, j) for j in left_b])
    sides = (a, b)
    ids = [sides[side][index].ids for _, side, index in entries]
    after = list(range(1, len(entries) + 1))
    before = list(range(-1, len(entries) - 1))
    prefix = [_common_prefix(x, y) for x, y in pairwise(ids)] + [0]
    heap = [(-length, k) for k, length in enumerate(prefix[:-1]) if length and entries[k][1] != entries[k + 1][1]]
    heapq.heapify(heap)
    gone: set[int] = set()
    while heap:
        length, k = heapq.heappop(heap)
        n = after[k] if k not in gone else len(entries)
        if n >= len(entries) or -length != prefix[k] or entries[k][1] == entries[n][1]:
            continue
        first, second = entries[k], entries[n]
        yield (first[2], second[2]) if first[1] == 0 else (second[2], first[2])
        gone |= {k, n}
        left, right = before[k], after[n]
        if left >= 0:
            after[left] = right
            prefix[left] = min(prefix[left], prefix[k], prefix[n])
        if right < len(entries):
            before[right] = left
            if left >= 0 and prefix[left] and entries[left][1] != entries[right][1]:
                heapq.heappush(heap, (-prefix[left], left))


def _behind(sequence: LogicalSequence, start: int, open_K: Mask, stop: int | None = None) -> I64:
    """Unmatched tokens of a sequence from a position on."""
    tokens = sequence.token[start:stop]
    tokens = tokens[tokens >= 0]
    return tokens[open_K[tokens]]


def _part(a: LogicalSequence, b: LogicalSequence, i: int, j: int, open_a: Mask, open_b: Mask) -> Parting | None:
    at = _common_prefix(a.ids, b.ids)
    behind_a, behind_b = _behind(a, 0, open_a), _behind(b, 0, open_b)
    if at == len(a.ids) == len(b.ids):
        shared = min(len(a.token), len(b.token))
        seen = np.flatnonzero((a.token[:shared] >= 0) & (b.token[:shared] >= 0))
        unlike = seen[open_a[a.token[seen]] & open_b[b.token[seen]]]
        if not len(unlike):
            return None
        at = int(unlike[0])
        text = "the ids are equal, but the sequences have another context (adapter, images)"
        return Parting(IDS, i, j, at, at, int(a.ids[at]), int(b.ids[at]), behind_a, behind_b, text)
    if at == min(len(a.ids), len(b.ids)):
        return None  # one side stops early: its missing rows are an absence, not a difference
    value_a, value_b = int(a.ids[at]), int(b.ids[at])
    text = f"A has id {value_a}, B has id {value_b}"
    if len(a.ids) != len(b.ids):
        text += f"; lengths {len(a.ids)} and {len(b.ids)}" + _equal_again(a.ids, b.ids, at)
    return Parting(IDS, i, j, at, at, value_a, value_b, behind_a, behind_b, text)


def _equal_again(ids_a: I64, ids_b: I64, at: int) -> str:
    """Whether the tails are the same again after a shift, as after another tokenization of one word."""
    shift = len(ids_a) - len(ids_b)
    tail = min(len(ids_a), len(ids_b)) - at
    equal = 0
    for length in range(1, tail + 1):
        if ids_a[-length] != ids_b[-length]:
            break
        equal = length
    return f", equal again after a shift of {abs(shift)} for the last {equal} ids" if equal >= _OFFSET_TOKENS else ""


def _at_another_offset(a: LogicalTrace, b: LogicalTrace, open_a: Mask, open_b: Mask, b_of_a: I64, a_of_b: I64) -> Iterator[Parting]:
    """Documents whose ids are equal on both sides, but which start at another offset: a packed row that one side
    reads as one document (the positions ran on), or tokens that one side has in front."""
    tails_a, tails_b = deque(_tails(a.sequences, open_a)), list(_tails(b.sequences, open_b))
    while tails_a:
        tail_a = tails_a.popleft()
        seq_a = a.sequences[tail_a.index]
        for k, tail_b in enumerate(tails_b):
            seq_b = b.sequences[tail_b.index]
            found = _locate(seq_a.ids[tail_a.start :], seq_b.ids[tail_b.start :])
            if found is None:
                continue
            at_a, at_b, length = tail_a.start + found[0], tail_b.start + found[1], found[2]
            if at_a == at_b:
                continue
            tails_b[k] = _Tail(tail_b.index, at_b + length)
            if at_a + length < len(seq_a.ids):
                tails_a.appendleft(_Tail(tail_a.index, at_a + length))
            if _matched_before(seq_a, at_a, b_of_a) if at_a > at_b else _matched_before(seq_b, at_b, a_of_b):
                behind_a, behind_b = _behind(seq_a, at_a, open_a, at_a + length), _behind(seq_b, at_b, open_b, at_b + length)
                value_a, value_b = _fed(a, POSITIONS, seq_a, at_a), _fed(b, POSITIONS, seq_b, at_b)
                text = (
                    f"A has position {value_a}, B has position {value_b} for the same {length} ids: "
                    "one side's document starts here, the other's runs on"
                )
                yield Parting(POSITIONS, tail_a.index, tail_b.index, at_a, at_b, value_a, value_b, behind_a, behind_b, text)
            else:
                longer, extra = ("A", at_a - at_b) if at_a > at_b else ("B", at_b - at_a)
                value_a, value_b = int(seq_a.ids[0]), int(seq_b.ids[0])
                text = f"A has id {value_a}, B has id {value_b}; {longer} has {extra} more in front, then {length} ids are equal"
                behind_a, behind_b = _behind(seq_a, 0, open_a), _behind(seq_b, 0, open_b)
                yield Parting(IDS, tail_a.index, tail_b.index, 0, 0, value_a, value_b, behind_a, behind_b, text)
            break


def _tails(sequences: Sequence[LogicalSequence], open_K: Mask) -> Iterator[_Tail]:
    for index, sequence in enumerate(sequences):
        if not len(sequence.ids):
            continue
        seen = np.flatnonzero(sequence.token >= 0)
        unmatched = seen[open_K[sequence.token[seen]]]
        if len(unmatched):
            yield _Tail(index, int(unmatched[0]))


def _locate(ids_a: I64, ids_b: I64) -> tuple[int, int, int] | None:
    """Where the shorter id list lies inside the longer one: (offset in a, offset in b, length)."""
    length = min(len(ids_a), len(ids_b))
    if length < _OFFSET_TOKENS:
        return None
    short, long = (ids_a, ids_b) if len(ids_a) <= len(ids_b) else (ids_b, ids_a)
    raw, needle, at = long.tobytes(), short.tobytes(), -1
    while (at := raw.find(needle, at + 1)) >= 0:
        if at % 8 == 0:
            return (0, at // 8, length) if short is ids_a else (at // 8, 0, length)
    return None


def _matched_before(sequence: LogicalSequence, at: int, other_of_this: I64) -> bool:
    """Whether the tokens right before a position are rows that the other side has too."""
    before = sequence.token[:at]
    before = before[before >= 0]
    return bool(len(before)) and bool(other_of_this[before[-1]] >= 0)


def _fed(trace: LogicalTrace, boundary: str, sequence: LogicalSequence, position: int) -> int:
    """The recorded value of an integer input at one token, else the token's own index."""
    recorded = trace.boundaries.get(boundary)
    values = None if recorded is None else recorded.load_values()
    if recorded is None or values is None:
        return position
    row = np.flatnonzero(recorded.token_R == sequence.token[position])
    return int(values[row[0], 0]) if len(row) else position

"""Sequences joined over ranks, and the table of their tokens: the first half of stitching.

A *place* is one (sequence, position), numbered through all sequences; a *row code* is a place and an expert id in
one number. Shape suffixes: S sequences, P places, K distinct tokens, R rows of a table or list, I recorded ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import Code, TraceFormatError
from tracer.format.schema import MOST_TOKENS, NotComputed, RowScope
from tracer.format.schema import Sequence as SequenceInfo
from tracer.format.store_read import Segment, Shard
from tracer.format.token_keys import label_keys, token_keys
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.logical import LogicalSequence, TokenTable

__all__ = ["PLACE_BITS", "KnownIds", "Places", "Tokens", "build_tokens", "declared_keys", "gather_ids", "lay_out_places"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

PLACE_BITS = 43
"""Bits of a row code; the rest of an int64 counts sightings of one row."""


@dataclass(frozen=True)
class Places:
    """The sequences of all shards, each with a range of places.

    ``base_S1``: first place of each sequence, then their number, (S + 1,). ``origin_S``: position of the first place.
    ``of_shard``: per shard its own sequence indices -> S. ``expert_bits``: low bits of a row code.
    """

    sequences: tuple[SequenceInfo, ...]
    base_S1: I64
    origin_S: I64
    of_shard: tuple[I64, ...]
    expert_bits: int
    _names: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return int(self.base_S1[-1])

    def places(self, sequence_R: I64, position_R: npt.NDArray[np.signedinteger[Any]]) -> I64:
        """Places of rows, int64 (R,)."""
        return (self.base_S1[:-1] - self.origin_S)[sequence_R] + position_R

    def row_codes(self, shard: int, segment: Segment) -> I64:
        """Row code of every row-table line of a segment, int64 (R,)."""
        codes = self.places(self.of_shard[shard][segment.rows_sequence], segment.rows_position)
        if self.expert_bits:
            codes <<= self.expert_bits
            codes += segment.rows_expert
            codes += 1
        return codes

    def sequence_of(self, place_R: I64) -> I64:
        """Index of the sequence that each place belongs to."""
        return np.searchsorted(self.base_S1, place_R, side="right") - 1

    def describe(self, code: int, scope: RowScope) -> tuple[str, int, int | None]:
        """Request or label, position and expert of a row code, as people read them."""
        place, expert = code >> self.expert_bits, (code & ((1 << self.expert_bits) - 1)) - 1
        sequence = int(self.sequence_of(np.array([place]))[0])
        position = place - int(self.base_S1[sequence]) + int(self.origin_S[sequence]) - (scope is RowScope.NEXT)
        info = self.sequences[sequence]
        return info.request or info.label, position, expert if expert >= 0 else None

    def name_keys(self) -> list[str]:
        """What stands for the ids of each sequence where they are unknown: request or label, told apart by scope where one
        name is used in several."""
        if not self._names:
            scopes: dict[str, set[str]] = {}
            for sequence in self.sequences:
                scopes.setdefault(sequence.request or sequence.label, set()).add(sequence.scope)
            for sequence in self.sequences:
                name = sequence.request or sequence.label
                self._names.append(f"{sequence.scope}/{name}" if len(scopes[name]) > 1 else name)
        return self._names


def lay_out_places(shards: Sequence[Shard]) -> tuple[Places, list[Finding]]:
    """Join the sequences of all shards by (scope, label) and number their places. ``shards``: by rank.

    Findings: contradictory salts. Raises ``TraceFormatError`` (segment-invalid) for positions no sequence has.
    """
    index: dict[tuple[str, str], int] = {}
    merged: list[SequenceInfo] = []
    of_shard: list[I64] = []
    findings: list[Finding] = []
    for shard in shards:
        own = []
        for sequence in shard.sequences:
            at = index.setdefault((sequence.scope, sequence.label), len(merged))
            if at == len(merged):
                merged.append(sequence)
            elif merged[at] != sequence:
                known = merged[at]
                if known.salt and sequence.salt and known.salt != sequence.salt:
                    findings.append(_contradiction(sequence, "salt", known.salt, sequence.salt, shard.rank))
                merged[at] = msgspec.structs.replace(
                    known,
                    request=known.request or sequence.request,
                    salt=known.salt or sequence.salt,
                    row=known.row or sequence.row,
                    start=min(known.start, sequence.start),
                )
            own.append(at)
        of_shard.append(np.array(own, np.int64))
    low_S = np.full(len(merged), np.iinfo(np.int64).max)
    high_S = np.zeros(len(merged), np.int64)
    most_experts = 0
    for own_S, shard in zip(of_shard, shards, strict=True):
        for segment in shard.segments:
            for sequence_R, position_R in (
                (segment.rows_sequence, segment.rows_position),
                (segment.ids_sequence, segment.ids_position),
            ):
                if not len(position_R):
                    continue
                if int(position_R.max()) >= MOST_TOKENS or int(position_R.min()) < 0:
                    raise TraceFormatError(
                        Code.SEGMENT_INVALID,
                        f"{segment.path.name} holds a position that no sequence has",
                        where=str(segment.path),
                        expected=f"0 .. {MOST_TOKENS - 1}",
                        found=f"{position_R.min()} .. {position_R.max()}",
                    )
                runs = np.flatnonzero(np.diff(sequence_R, prepend=-1))  # few, unless every row is of another sequence than the one before
                sequence_of_run = own_S[sequence_R[runs]]
                np.minimum.at(low_S, sequence_of_run, np.minimum.reduceat(position_R, runs))
                last_of_run = np.maximum.reduceat(position_R, runs)
                np.maximum.at(high_S, sequence_of_run, last_of_run + np.int64(2))  # one more, as a row may speak of the next token
            if len(segment.rows_expert):
                most_experts = max(most_experts, int(segment.rows_expert.max()) + 1)
    low_S = np.minimum(low_S, high_S)
    base_S1 = np.concatenate([[0], np.cumsum(high_S - low_S)])
    expert_bits = int(most_experts).bit_length() if most_experts else 0
    if int(base_S1[-1]) << expert_bits >= 1 << PLACE_BITS:
        raise TraceFormatError(
            Code.SEGMENT_INVALID,
            "more tokens and experts than a trace can hold",
            where=str(shards[0].path.parent),
            expected=f"below 2^{PLACE_BITS}",
            found=f"{base_S1[-1]} tokens x {most_experts} experts",
        )
    return Places(tuple(merged), base_S1, low_S, tuple(of_shard), expert_bits), findings


@dataclass(frozen=True)
class KnownIds:
    """``id_P``: token id per place, where ``known_P``. ``prefix_S``: how many ids of each sequence are known from position 0 on."""

    id_P: I64
    known_P: Bools
    prefix_S: I64


def gather_ids(places: Places, shards: Sequence[Shard]) -> tuple[KnownIds, list[Finding]]:
    """Everything any process knew of the token ids. Findings: contradictory ids, one per sequence."""
    id_P, known_P = np.zeros(len(places), np.int64), np.zeros(len(places), np.bool_)
    findings: dict[int, Finding] = {}
    for own_S, shard in zip(places.of_shard, shards, strict=True):
        for segment in shard.segments:
            if not len(segment.ids_token):
                continue
            sequence_I = own_S[segment.ids_sequence]
            place_I = places.places(sequence_I, segment.ids_position)
            new_I = ~known_P[place_I]
            id_P[place_I[new_I]] = segment.ids_token[new_I]
            known_P[place_I] = True
            for i in np.flatnonzero(id_P[place_I] != segment.ids_token):
                sequence, info = int(sequence_I[i]), places.sequences[sequence_I[i]]
                if sequence not in findings:
                    finding = _contradiction(info, "token id", str(id_P[place_I[i]]), str(segment.ids_token[i]), shard.rank)
                    position = int(segment.ids_position[i])
                    findings[sequence] = msgspec.structs.replace(finding, position=position, text=f"{finding.text} at position {position}")
    unknown = np.append(np.flatnonzero(~known_P), len(places))
    base_S, stop_S = places.base_S1[:-1], places.base_S1[1:]
    first_S = np.minimum(unknown[np.searchsorted(unknown, base_S)], stop_S)
    prefix_S = np.where(places.origin_S == 0, first_S - base_S, 0)
    return KnownIds(id_P, known_P, prefix_S), [findings[sequence] for sequence in sorted(findings)]


def _contradiction(sequence: SequenceInfo, what: str, first: str, other: str, rank: int) -> Finding:
    name = sequence.request or sequence.label
    return Finding(
        code=FindingCode.IDS_CONTRADICT,
        kind=Kind.UNREADABLE,
        request=name,
        ranks=(rank,),
        text=f"rank {rank} says another {what} of {name} than was known: {other}, not {first}",
        remedy="two sequences of one scope carry the same label; the host must tell them apart",
    )


@dataclass(frozen=True)
class Tokens:
    """The token table, and what stitching needs of it: ``token_P``, index into the table per place, -1 where never seen."""

    table: TokenTable
    sequences: tuple[LogicalSequence, ...]
    token_P: I64


def build_tokens(places: Places, ids: KnownIds, seen_P: Bools) -> Tokens:
    """Key every known or seen token and list the distinct ones that were seen. ``seen_P``: places with a row of any boundary."""
    key_P = np.zeros(len(places), np.uint64)
    keyed_P = np.zeros(len(places), np.bool_)
    for sequence, prefix in enumerate(ids.prefix_S.tolist()):
        if prefix:
            base = int(places.base_S1[sequence])
            key_P[base : base + prefix] = token_keys(ids.id_P[base : base + prefix], places.sequences[sequence].salt)
            keyed_P[base : base + prefix] = True
    labelled = np.flatnonzero(seen_P & ~keyed_P)
    labelled_sequence = places.sequence_of(labelled)
    bounds = np.flatnonzero(np.diff(labelled_sequence, prepend=-1, append=len(places.sequences)))
    for start, stop in itertools.pairwise(bounds.tolist()):
        sequence = int(labelled_sequence[start])
        position = labelled[start:stop] - places.base_S1[sequence] + places.origin_S[sequence]
        key_P[labelled[start:stop]] = label_keys(places.name_keys()[sequence], position)

    has_key = np.flatnonzero(keyed_P | seen_P)
    distinct, first, inverse = np.unique(key_P[has_key], return_index=True, return_inverse=True)
    seen_places = has_key[seen_P[has_key]]
    token_of_seen = inverse[seen_P[has_key]]
    seen_first = np.full(len(distinct), -1, np.int64)
    seen_first[token_of_seen[::-1]] = seen_places[::-1]
    order = np.flatnonzero(seen_first >= 0)
    order = order[np.argsort(first[order], kind="stable")]  # by first place of the key, computed there or only known: prefixes come first
    index = np.full(len(distinct), -1, np.int64)
    index[order] = np.arange(len(order))
    table_P = np.full(len(places), -1, np.int64)
    table_P[has_key] = index[inverse]

    first_place = has_key[first[order]]
    sequence_K = places.sequence_of(first_place)
    latest = np.maximum.accumulate(np.where(table_P >= 0, np.arange(len(places)), -1))
    before = np.where(first_place > 0, latest[first_place - 1], -1) if len(order) else first_place
    previous_K = np.where(before >= places.base_S1[sequence_K], table_P[before], -1)
    shown = seen_first[order]
    shown_sequence = places.sequence_of(shown)
    table = TokenTable(
        key_K=distinct[order],
        sequence_K=shown_sequence,
        position_K=shown - places.base_S1[shown_sequence] + places.origin_S[shown_sequence],
        previous_K=previous_K,
        labelled_K=~keyed_P[first_place],
    )
    token_P = np.where(seen_P, table_P, -1)
    return Tokens(table, tuple(_sequences(places, ids, token_P)), token_P)


def _sequences(places: Places, ids: KnownIds, token_P: I64) -> Iterable[LogicalSequence]:
    for index, sequence in enumerate(places.sequences):
        base, stop, origin = int(places.base_S1[index]), int(places.base_S1[index + 1]), int(places.origin_S[index])
        token = token_P[base:stop]
        if stop > base and token[-1] < 0:
            token = token[:-1]  # the place kept for a next token that nobody spoke of
        if origin:
            token = np.concatenate([np.full(origin, -1, np.int64), token])
        yield LogicalSequence(
            label=sequence.label,
            request=sequence.request,
            scope=sequence.scope,
            ids=ids.id_P[base : base + int(ids.prefix_S[index])],
            token=token,
            row=sequence.row,
        )


def declared_keys(
    places: Places, ids: KnownIds, declarations: Iterable[NotComputed], next_boundaries: Iterable[str]
) -> Mapping[str, Mapping[str, U64]]:
    """Reason -> boundary -> sorted distinct keys of rows declared never computed.

    ``next_boundaries``: those whose row t is keyed by token t + 1. A declaration for all boundaries is listed under
    the empty name for the others, and under each of these by its own keys.
    """
    index = {(sequence.scope, sequence.label): at for at, sequence in enumerate(places.sequences)}
    shifted = set(next_boundaries)
    found: dict[tuple[str, str], list[U64]] = {}
    keys_of: dict[int, U64] = {}
    for declared in declarations:
        at = index.get((declared.scope, declared.sequence), -1)
        if at >= 0 and at not in keys_of:
            base, prefix = int(places.base_S1[at]), int(ids.prefix_S[at])
            keys_of[at] = token_keys(ids.id_P[base : base + prefix], places.sequences[at].salt)
        known = keys_of.get(at, np.empty(0, np.uint64))
        name = places.name_keys()[at] if at >= 0 else declared.sequence
        position = np.concatenate([np.arange(start, stop) for start, stop in ((0, 0), *declared.positions)])
        for boundary in declared.boundaries or ("", *sorted(shifted)):
            wanted = position + (boundary in shifted)
            inside = wanted < len(known)
            keys = np.concatenate([known[wanted[inside]], label_keys(name, wanted[~inside])])
            found.setdefault((declared.reason, boundary), []).append(keys)
    result: dict[str, dict[str, U64]] = {}
    for reason, boundary in sorted(found):
        result.setdefault(reason, {})[boundary] = np.unique(np.concatenate(found[reason, boundary]))
    return result

"""What one call of a transformers model says about its rows: tokens or padding, positions, documents, logits.

Facts about the library that this file relies on (5.16 to 5.24):
- Packed documents are kept apart only if neither a 2-D mask nor a cache is there (``masking_utils``), and a cache is made
  by default (``use_cache``); flash attention looks at cu_seqlens or positions instead (``modeling_flash_attention_utils``).
- A 2-D mask narrower than cache plus input is padded with zeros on the right.
- ``generate`` with a static cache passes prepared 4-D masks, a dict of them where layers differ.

Shape suffixes: B batch rows, S columns of this call, P slots in the cache before it, K = P + S, N = B * S.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tracer.errors import Code, HostError
from tracer.format.schema import Note
from tracer.hosts.transformers_sequences import CacheHistory, Call, first_visible_slots
from tracer.record.host import IntArray, Rows
from tracer.record.tokens import SequenceRegistry

__all__ = ["InputReader", "logit_rows"]

BoolArray = npt.NDArray[np.bool_]
Shape = tuple[int, int, int]
"""B, S, P."""

_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

_NO_CONTEXT = {"inputs_embeds", "attention_mask", "position_embeddings", "labels", "shift_labels", "head_mask"}
"""Float arguments that are no context of their own."""


_NOT_A_RUN = "the attention mask shows more or less than a run of tokens up to the row's own"


@dataclass(frozen=True)
class _Mask:
    """What a mask says. ``token_BS``: real tokens of this call. ``past_BP``: those of the cache, where it covers it.
    ``first_BS``: first slot every row may attend to; None where it does not tell. ``unseen``: why that is not all it says."""

    token_BS: BoolArray
    past_BP: BoolArray | None = None
    first_BS: IntArray | None = None
    unseen: str = ""


class InputReader:
    """Reads the arguments of one model's calls. Nothing given is changed or kept."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._config = model.config.get_text_config()

    def read(
        self,
        number: int,
        given: Mapping[str, Any],
        cache: Any,
        shape: Shape,
        history: CacheHistory | None,
        sequences: SequenceRegistry,
    ) -> tuple[Call, IntArray]:
        """Forward ``number`` as the tracker wants it, and ``input.positions``: (N,), or (N, planes) for multi-axis rope.

        ``given``: arguments by name. ``cache``: the one given, if any. ``history``: whose tokens it holds, None where unknown."""
        batch, columns, past = shape
        ids = given.get("input_ids")
        mask = given.get("attention_mask")
        known_BP = history.real_BP[:, :past] if history is not None and history.length >= past and history.batch == batch else None
        seen = self._read_mask(mask, shape, known_BP)
        token_BS, visible_BS, unseen = seen.token_BS, seen.first_BS, seen.unseen
        if unseen and not any(note.code == "mask-unreadable" for note in sequences.notes):
            sequences.notes.append(Note(code="mask-unreadable", text=f"input.visible_from is not told: {unseen}"))
        position_BSP, positions_given = _positions(given.get("position_ids"), shape)
        cu_seqlens = given.get("cu_seq_lens_q")
        lengths = None if past else sequences.document_lengths(token_BS)
        if lengths is None and isinstance(cu_seqlens, torch.Tensor) and not past:
            lengths = _row_lengths(_array(cu_seqlens), batch, columns)
        if lengths is not None:
            total_B = np.array([sum(row) for row in lengths])
            token_BS = token_BS & (np.cumsum(token_BS, axis=1) <= total_B[:, None])
        document_BS = self._document_slots(given, cache, position_BSP, shape)
        visible_BS = visible_BS if document_BS is None else document_BS
        generating, end_ids = self._generation()
        call = Call(
            number=number,
            ids_BS=None if ids is None or ids.ndim != 2 else _array(ids),
            token_BS=token_BS,
            position_BS=position_BSP[..., 0],
            positions_given=positions_given,
            past=past,
            past_BP=seen.past_BP,
            visible_BS=visible_BS,
            mask_unseen=unseen,
            lengths=lengths,
            generating=generating,
            end_ids=end_ids,
            salt=_salt(given),
        )
        position_NP = position_BSP.reshape(batch * columns, position_BSP.shape[2])
        return call, position_NP[:, 0] if position_NP.shape[1] == 1 else position_NP

    def _read_mask(self, mask: Any, shape: Shape, known_BP: BoolArray | None) -> _Mask:
        """What a mask says. ``known_BP``: real tokens in the cache, where its history is known."""
        batch, columns, past = shape
        slots = past + columns
        everything = np.ones((batch, columns), bool)
        whole = True
        if isinstance(mask, Mapping):  # prepared by generate, one per kind of layer
            whole = "full_attention" in mask
            mask = mask.get("full_attention", next(iter(mask.values()), None))
        if mask is None:
            return _Mask(everything)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            given_BK = _array(mask) != 0
            if given_BK.shape[1] >= slots:
                allowed_BK = given_BK[:, :slots]
                token_BS, past_BP = allowed_BK[:, past:], allowed_BK[:, :past]
            else:
                allowed_BK = np.pad(given_BK, ((0, 0), (0, slots - given_BK.shape[1])))
                token_BS, past_BP = given_BK[:, -columns:] if given_BK.shape[1] >= columns else everything, None
            first_BS = first_visible_slots(allowed_BK, past, columns)
            real_BP = known_BP if known_BP is not None else allowed_BK[:, :past]
            real_BK = np.concatenate([real_BP, token_BS], axis=1)
            first_B = np.maximum(first_BS[:, 0], real_BK.argmax(axis=1))
            behind_BK = np.arange(slots) >= first_B[:, None]
            unseen = _NOT_A_RUN if (behind_BK & (allowed_BK != real_BK)).any() else ""
            return _Mask(token_BS, past_BP, first_BS, unseen)
        if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[-1] >= slots and mask.shape[-2] >= columns:
            windowed = getattr(self._config, "sliding_window", None) or getattr(self._config, "attention_chunk_size", None)
            seen = self._read_prepared(mask[..., -columns:, :slots].detach(), shape, known_BP)
            return replace(seen, first_BS=None) if windowed and not whole else seen
        return _Mask(everything, unseen=f"an attention mask of type {type(mask).__name__} cannot be read")

    def _read_prepared(self, mask: torch.Tensor, shape: Shape, known_BP: BoolArray | None) -> _Mask:
        """What a mask says that goes to the attention as it is: (B or 1, heads or 1, S, K)."""
        batch, columns, past = shape
        slots = past + columns
        one = mask[:, 0]
        unseen = "the attention mask is not the same for all heads" if bool((mask != mask[:, :1]).any()) else ""
        # eager attention adds whatever it is given to the scores, so a bool mask hides nothing there
        added = one.is_floating_point() or self._config._attn_implementation == "eager"
        if not added:
            allowed = one != 0
        elif one.is_floating_point():
            allowed = one > torch.finfo(one.dtype).min / 2
        else:
            allowed = torch.ones_like(one, dtype=torch.bool)
        if added and bool((one[allowed] != 0).any()):
            unseen = unseen or "the attention mask adds to the scores of what it does not hide"
        allowed = allowed.expand(batch, columns, slots)
        first = torch.where(allowed.any(-1), allowed.to(torch.uint8).argmax(-1), slots)
        token_BS = _array(allowed[:, range(columns), range(past, slots)]) != 0
        slot_K = torch.arange(slots, device=allowed.device)
        real_BP = torch.from_numpy(known_BP).to(allowed.device) if known_BP is not None else allowed[..., :past].any(1)
        token = torch.from_numpy(token_BS).to(allowed.device)
        real = torch.cat([real_BP, token], 1)
        lead = slot_K < real.to(torch.uint8).argmax(1)[:, None]
        run = (slot_K >= first[..., None]) & (slot_K <= slot_K[past:, None]) & (real | lead)[:, None]
        if not unseen and bool(((allowed != run) & token[..., None]).any()):
            unseen = _NOT_A_RUN
        return _Mask(token_BS, None, _array(first), unseen)

    def _document_slots(self, given: Mapping[str, Any], cache: Any, position_BSP: IntArray, shape: Shape) -> IntArray | None:
        """First slot of the document of every row, where the model really keeps packed documents apart: (B, S)."""
        batch, columns, past = shape
        mask = given.get("attention_mask")
        if past:
            return None
        if self._attention_kind() == "mask":
            if mask is not None or cache is not None or self._makes_cache(given) or position_BSP.shape[2] not in (1, 4):
                return None
            start_BS = np.diff(position_BSP[..., 0], axis=1, prepend=position_BSP[:, :1, 0] - 1) != 1
            start_BS[:, 0] = True
        else:
            if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask != 0).all())):
                return None
            start_BS = np.zeros((batch, columns), bool)
            start_BS[:, 0] = True
            cu_seqlens = given.get("cu_seq_lens_q")
            position_S = position_BSP[0, :, 0]
            if isinstance(cu_seqlens, torch.Tensor) and all(given.get(name) is not None for name in _VARLEN):
                edges = _array(cu_seqlens)
                start_BS.reshape(-1)[edges[edges < batch * columns]] = True
            elif batch == 1 and (position_S != position_S.min() + np.arange(columns)).any():
                start_BS[0] |= position_S == position_S.min()
        if not start_BS[:, 1:].any():
            return None
        return np.maximum.accumulate(np.where(start_BS, np.arange(columns), 0), axis=1)

    def _attention_kind(self) -> str:
        """``mask`` where the library builds a mask for the attention function, ``varlen`` where the function is handed
        positions and cu_seqlens (flash attention, attention of the user's own)."""
        from transformers import masking_utils

        implementation = self._config._attn_implementation
        builder = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
        return "varlen" if builder is None or builder is masking_utils.flash_attention_mask else "mask"

    def _makes_cache(self, given: Mapping[str, Any]) -> bool:
        """Whether the model makes itself a cache in a call without one."""
        from transformers.utils import generic

        use_cache = given.get("use_cache")
        if use_cache is None:
            use_cache = getattr(self._config, "use_cache", False)
        checkpointed = any(getattr(module, "gradient_checkpointing", False) and module.training for module in self._decoders())
        needs_grad = "is_grad_enabled" in _names(generic.merge_with_config_defaults)
        return bool(use_cache) and not (checkpointed and (torch.is_grad_enabled() or not needs_grad))

    def _decoders(self) -> list[torch.nn.Module]:
        return [self._model, *([self._model.base_model] if self._model.base_model is not self._model else [])]

    def _generation(self) -> tuple[bool, frozenset[int]]:
        """Whether this model's ``generate`` is calling, and the ids that end its sequences.

        Raises HostError (host-unsupported) where ``generate`` will run its steps compiled: no hook would hear of them."""
        config = None
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__") == "transformers.generation.utils" and "self" in frame.f_code.co_varnames:
                held = frame.f_locals
                if held.get("self") is self._model:
                    config = config or held.get("generation_config")
                    if hasattr(held.get("model_forward"), "_torchdynamo_orig_callable") and not _forced_eager():
                        raise HostError(
                            Code.HOST_UNSUPPORTED,
                            "generate() compiled the model for its decode steps, which then run no hooks",
                            found="a compilable cache on a device that generate() compiles for",
                            remedy="pass disable_compile=True to generate() while tracing",
                        )
            frame = frame.f_back  # type: ignore[assignment]
        ids = None if config is None else config.eos_token_id
        return config is not None, frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _forced_eager() -> bool:
    """Whether compiled code runs as plain Python now (``torch.compiler.set_stance("force_eager")``)."""
    return getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "") == "force_eager"


def _positions(position_ids: Any, shape: Shape) -> tuple[IntArray, bool]:
    """Position ids as the model will use them: (B, S, planes), and whether they were given."""
    batch, columns, past = shape
    if not isinstance(position_ids, torch.Tensor):
        default_BS = np.broadcast_to(past + np.arange(columns), (batch, columns))
        return default_BS[..., None], False
    position_PBS = _array(position_ids)
    if position_PBS.ndim < 3:
        position_PBS = np.atleast_2d(position_PBS)[None]
    position_PBS = np.broadcast_to(position_PBS[..., -columns:], (position_PBS.shape[0], batch, columns))
    return np.moveaxis(position_PBS, 0, -1), True


def _row_lengths(cu_seqlens: IntArray, batch: int, columns: int) -> list[list[int]]:
    """Document lengths per batch row from cu_seqlens over all rows, flattened."""
    edges = np.unique(np.concatenate([cu_seqlens, np.arange(batch + 1) * columns]))
    edges = edges[edges <= max(int(cu_seqlens.max(initial=0)), 0)]
    lengths: list[list[int]] = [[] for _ in range(batch)]
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        lengths[start // columns].append(stop - start)
    return lengths


def logit_rows(keep: Any, rows: Rows, batch: int, columns: int) -> tuple[BoolArray, Rows | None]:
    """Columns whose logits are computed (B, S), and what the rows of the logits are; None for all rows in order."""
    index_BS = np.arange(batch * columns).reshape(batch, columns)
    if keep is None or (isinstance(keep, int) and keep == 0):
        return np.ones((batch, columns), bool), None
    if isinstance(keep, int):
        index_N = index_BS[:, -keep:].reshape(-1)
    else:
        chosen = keep.detach().cpu().numpy()
        if chosen.ndim == 2 and chosen.dtype != bool:
            index_N = np.take_along_axis(index_BS, chosen, axis=1).reshape(-1)
        else:
            index_N = index_BS[chosen].reshape(-1) if chosen.ndim == 2 else index_BS[:, chosen].reshape(-1)
    kept_BS = np.zeros((batch, columns), bool)
    kept_BS.reshape(-1)[index_N] = True
    return kept_BS, Rows(rows.sequence_N[index_N], rows.position_N[index_N])


def _salt(given: Mapping[str, Any]) -> str:
    """Digest of everything else with float values that a call is given (pixels, audio): context that ids do not tell."""
    digest = xxhash.xxh3_64()
    found = False
    for name in sorted(given):
        value = given[name]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in _NO_CONTEXT:
            found = True
            digest.update(name.encode() + str(tuple(value.shape)).encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else ""


def _array(tensor: torch.Tensor) -> IntArray:
    return tensor.detach().to("cpu", torch.int64).numpy()


def _names(function: Any) -> set[str]:
    """Every name that a function and the functions inside it use."""
    codes = [function.__code__]
    names: set[str] = set()
    for code in codes:
        names.update(code.co_names)
        codes.extend(const for const in code.co_consts if hasattr(const, "co_names"))
    return names

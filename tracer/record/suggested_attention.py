"""The attention part of a layer, told by numbers: projections, norms of q and k, rope, core, output. For ``suggested_blocks``.

Shape suffixes: N tokens, C columns.
"""

from __future__ import annotations

import re

import torch

from tracer.record.observed_forward import Leaf, TapLeaf, rows_of
from tracer.record.suggested_operators import close, ratio_of
from tracer.record.suggestions import Guess, LayerView, Operator

__all__ = ["find_attention"]

_NAMED = {"q": r"q|wq|q_proj|query|q_lin", "k": r"k|wk|k_proj|key|k_lin", "v": r"v|wv|v_proj|value|v_lin"}
"""Last part of a projection's path, where numbers do not tell q from k."""


def find_attention(layer: LayerView, out: Leaf, taps_exist: bool) -> None:
    """``attn.*`` of a layer whose attention part returns ``out``; ``linear_attn.out`` alone where the host's attention function
    ran in other layers but not here."""
    scope = layer.scope(out)
    tapped = next((path for path in layer.seen.taps if path == scope or path.startswith(f"{scope}.")), "")
    projection = next((found for found in layer.linears(scope) if found.returned.key == out.key), None)
    if taps_exist and not tapped:
        layer.guess("linear_attn.out", out, f"added to the residual stream; no attention function ran in {layer.template(out.module)}")
        if projection is not None:
            layer.name_weights(projection.module, "linear_attn.out", transpose=projection.kind == "transposed")
        layer.missing.append("linear_attn.*: what is inside a linear attention is not searched")
        return
    layer.guess("attn.out", out, "added to the residual stream" + (", and the attention function runs inside" if tapped else ""))
    taps = {leaf.leaf: leaf for leaf in layer.seen.taps.get(tapped, ())}
    if projection is not None:
        layer.name_weights(projection.module, "attn.out", transpose=projection.kind == "transposed")
        _core(layer, projection, tapped, taps.get("output"))
    sources = [found for found in layer.linears(scope) if projection is None or found.module != projection.module]
    if scope == layer.path:
        sources = [found for found in sources if found.returned.order < out.order]
    if not taps:
        _by_name(layer, sources, "no attention function was seen; ")
        return
    packed = _packed(layer, sources, taps)
    for part in () if packed else ("q", "k", "v"):
        _projection(layer, part, sources, scope, tapped, taps[part])
    for part in ("q", "k"):
        _rope(layer, part, tapped, taps[part])


def _core(layer: LayerView, projection: Operator, tapped: str, output: TapLeaf | None) -> None:
    given = projection.given
    evidence = f"{layer.template(projection.module)} turns it into attn.out: output = input x weight"
    if output is None:
        layer.guess("attn.core", given, evidence)
        return
    core_NC = rows_of(output.tensor, output.layout)
    if close(given.rows_NC, core_NC):
        layer.guess("attn.core", given, f"{evidence}; it is what the attention function returned")
    else:
        layer.guesses["layers.{layer}.attn.core"] = _tap_guess(layer, tapped, output, "returned by the attention function")
        layer.guess("attn.gated", given, f"{evidence}; not what the attention function returned, so something is between (a gate)")


def _tap_guess(layer: LayerView, module: str, leaf: TapLeaf, evidence: str) -> Guess:
    return Guess({"module": layer.template(module), "tap": leaf.tap, "leaf": leaf.leaf, "layout": leaf.layout}, evidence)


def _lengths(rows_NC: torch.Tensor, heads: int) -> torch.Tensor | None:
    """Length of every head's vector: (N, heads); rope keeps it."""
    count, columns = rows_NC.shape
    return rows_NC.float().reshape(count, heads, -1).norm(dim=-1) if columns % heads == 0 else None


def _same_lengths(rows_NC: torch.Tensor, tap: TapLeaf) -> bool:
    """Whether the heads of these rows are as long as the tap's, up to one factor for all."""
    heads = tap.tensor.shape[1]
    wanted_NC = rows_of(tap.tensor, tap.layout)
    found, wanted = _lengths(rows_NC, heads), _lengths(wanted_NC, heads)
    assert wanted is not None
    return found is not None and rows_NC.shape == wanted_NC.shape and ratio_of(wanted, found) is not None


def _projection(layer: LayerView, part: str, sources: list[Operator], scope: str, tapped: str, tap: TapLeaf) -> None:
    """attn.q, k or v, with its norm where there is one."""
    why = "the attention function gets the same values" if part == "v" else "its heads are as long as those the attention function gets"
    for found in sources:
        if _same_lengths(found.returned.rows_NC, tap) and (part != "v" or close(found.returned.rows_NC, rows_of(tap.tensor, tap.layout))):
            layer.guess(f"attn.{part}", found.returned, f"a linear map; {why}")
            layer.name_weights(found.module, f"attn.{part}", transpose=found.kind == "transposed")
            return
    for norm in layer.norms(scope):
        if norm.returned.layout != "(t h) d" and _same_lengths(norm.returned.rows_NC, tap):
            if not any(_is_part(norm.given.rows_NC, found.returned.rows_NC) for found in sources):
                layer.missing.append(f"attn.{part}_norm: {layer.template(norm.module)} is given no projection as it is (rope comes before)")
                break
            layer.guess(f"attn.{part}_norm", norm.returned, f"{norm.kind} by its numbers; {why}")
            layer.name_weights(norm.module, f"attn.{part}_norm")
            source = next((found for found in sources if found.returned.key == norm.given.key), None)
            if source is None:
                layer.guess(f"attn.{part}", norm.given, f"what {layer.template(norm.module)} is given; no projection returns it alone")
            else:
                layer.guess(f"attn.{part}", source.returned, f"a linear map, given to {layer.template(norm.module)}")
                layer.name_weights(source.module, f"attn.{part}", transpose=source.kind == "transposed")
            return
    _by_name(layer, sources, "its numbers do not tell; ", (part,))
    if part == "v" and "layers.{layer}.attn.v" not in layer.guesses:
        layer.missing.pop()
        evidence = "what the attention function gets as v; no projection returns it"
        layer.guesses["layers.{layer}.attn.v"] = _tap_guess(layer, tapped, tap, evidence)


def _is_part(rows_NC: torch.Tensor, whole_NC: torch.Tensor) -> bool:
    """Whether every number of every row stands in the same row of ``whole_NC``, bit for bit."""
    return all(bool(torch.isin(row, whole).all()) for row, whole in zip(rows_NC, whole_NC, strict=True))


def _packed(layer: LayerView, sources: list[Operator], taps: dict[str, TapLeaf]) -> bool:
    """Whether one projection holds q, k and v side by side, in that order; then they are noted."""
    rows = {part: rows_of(taps[part].tensor, taps[part].layout) for part in ("q", "k", "v")}
    widths = [rows[part].shape[1] for part in rows]
    for found in sources:
        returned_NC = found.returned.rows_NC
        if returned_NC.shape[1] != sum(widths):
            continue
        q_NC, k_NC, v_NC = torch.split(returned_NC, widths, 1)
        if close(v_NC, rows["v"]) and _same_lengths(q_NC, taps["q"]) and _same_lengths(k_NC, taps["k"]):
            names = [f"layers.{{layer}}.attn.{part}" for part in ("q", "k", "v")]
            shares = [width // min(widths) for width in widths] if all(width % min(widths) == 0 for width in widths) else widths
            for part in ("q", "k", "v"):
                evidence = "q, k, v side by side: v is what the attention function gets, heads of q and k are as long"
                layer.guess(f"attn.{part}", found.returned, evidence, split=names, shares=shares)
            transpose = found.kind == "transposed"
            layer.name_weights(found.module, "attn.q", "attn.k", "attn.v", transpose=transpose, shares=tuple(shares))
            return True
    return False


def _by_name(layer: LayerView, sources: list[Operator], because: str, parts: tuple[str, ...] = ("q", "k", "v")) -> None:
    for part in parts:
        named = [found for found in sources if re.fullmatch(_NAMED[part], found.module.rpartition(".")[2])]
        if len(named) == 1:
            layer.guess(f"attn.{part}", named[0].returned, f"{because}BY ITS NAME ALONE, a linear map")
            layer.name_weights(named[0].module, f"attn.{part}", transpose=named[0].kind == "transposed")
        else:
            layer.missing.append(f"attn.{part}: {because}no projection has a name for it")


def _rope(layer: LayerView, part: str, tapped: str, tap: TapLeaf) -> None:
    """attn.q_rope or k_rope; noted as unchanged where the attention function gets the projection as it is in every row."""
    name = f"layers.{{layer}}.attn.{part}"
    before = layer.guesses.get(f"{name}_norm") or layer.guesses.get(name)
    if before is not None:
        path, leaf = str(before.binding["module"]).replace("{layer}", str(layer.index)), before.binding.get("leaf", "output")
        rows_NC = next(found for found in layer.leaves if found.module == path and found.leaf == leaf).rows_NC
        if "split" in before.binding:
            shares, place = before.binding["shares"], ("q", "k", "v").index(part)
            start, stop = (rows_NC.shape[1] * sum(shares[:end]) // sum(shares) for end in (place, place + 1))
            rows_NC = rows_NC[:, start:stop]
        if close(rows_NC, rows_of(tap.tensor, tap.layout)):
            layer.unchanged.add(f"{name}_rope")
    layer.guesses[f"{name}_rope"] = _tap_guess(layer, tapped, tap, f"what the attention function gets as {part}, for this call's tokens")

"""Where the boundaries of an unknown decoder are, found in one observed forward: by equal bits, sums and formulas, not by names.

A guess is made only where numbers say so; what they leave open is left out and listed, and a guess by name says that it is one.
Boundaries are called as in the map ``any_decoder``; ``map_draft`` writes them down.

Shape suffixes: N tokens, C columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

import torch

from tracer.errors import Code, MapError
from tracer.record.observed_forward import Leaf, Observation
from tracer.record.suggested_attention import find_attention
from tracer.record.suggested_mlp import find_mlp
from tracer.record.suggested_operators import linear_kind, norm_kind, ratio_of
from tracer.record.suggestions import Findings, Guess, LayerView, WeightGuess, leaf_binding, operands

__all__ = ["find_boundaries"]


def find_boundaries(seen: Observation) -> Findings:
    """All guesses about a decoder that was observed once. Raises MapError map-unfit where it shows no stack of layers."""
    views = _layers(seen)
    first = views[0]
    found = Findings(first.template(first.path), tuple(view.index for view in views))
    _inputs(seen, found)
    _rope_table(seen, found)
    _embedding(seen, found, first)
    taps_exist = any(any(path.startswith(f"{view.path}.") for path in seen.taps) for view in views)
    for view in views:
        _layer(view, taps_exist)
        for name, guess in view.guesses.items():
            found.guesses.setdefault(name, {})[view.index] = guess
        for parameter, weight in view.weights.items():
            found.weights.setdefault(parameter, weight)
        found.missing += [f"{text} (layer {view.index})" for text in view.missing]
    for name in views[0].unchanged.intersection(*(view.unchanged for view in views)):
        del found.guesses[name]
    _head(seen, found, views[-1])
    return found


# ------------------------------------------------------------------------------------------------ the stack of layers


def _layers(seen: Observation) -> list[LayerView]:
    """The longest stack of modules in which each is given, bit for bit, what the one before returned."""
    stacks: dict[str, list[int]] = {}
    for path in seen.modules:
        if (match := re.fullmatch(r"(.*)\.(\d+)", path)) is not None and seen.calls.get(path) == 1:
            stacks.setdefault(match[1], []).append(int(match[2]))
    chains = [chain for stack, numbers in stacks.items() if (chain := _chain(seen, stack, sorted(numbers)))]
    if not chains:
        raise MapError(
            Code.MAP_UNFIT,
            "no decoder layers are seen in this model",
            expected="numbered modules of which each is given, bit for bit, what the one before returned",
            found=f"{len(stacks)} numbered stacks among {len(seen.modules)} modules: {', '.join(sorted(stacks)) or 'none'}",
            remedy="write the map by hand: docs/how-to/write-a-map.md",
        )
    return max(chains, key=lambda chain: (len(chain), -chain[0].path.count(".")))


def _chain(seen: Observation, stack: str, numbers: list[int]) -> list[LayerView]:
    views: list[LayerView] = []
    for number in numbers:
        path = f"{stack}.{number}"
        hidden = [leaf for leaf in seen.of(path) if leaf.tensor.is_floating_point() and leaf.layout in ("b s c", "s b c", "t c")]
        entry = next((leaf for leaf in hidden if leaf.given and (not views or leaf.key == views[-1].exit.key)), None)
        leaving = next((leaf for leaf in hidden if not leaf.given and entry is not None and leaf.tensor.shape == entry.tensor.shape), None)
        if entry is None or leaving is None:
            return []
        views.append(LayerView(number, path, seen, entry, leaving))
    return views


# ------------------------------------------------------------------------------------------------ one layer


def _layer(view: LayerView, taps_exist: bool) -> None:
    binding = leaf_binding(view.exit, view.template(view.path))
    evidence = "the next layer is given it, bit for bit (the last one: what the final norm or head reads)"
    view.guesses["layers.{layer}.residual"] = Guess(binding, evidence)
    parts = _sums(view)
    if len(parts) != 2:
        view.missing.append(f"attn.*, mlp.*: the layer's output is not its input plus two parts, one after the other ({len(parts)} found)")
        return
    (attention, middle), (mlp, _) = parts
    if middle is None:
        view.missing.append("attn.residual: both parts are added at once (parallel attention and MLP)")
    else:
        reader = view.reader(middle.key)
        assert reader is not None
        view.guess("attn.residual", reader, "= residual before + the attention part, bit for bit")
    find_attention(view, _behind_norm(view, attention, "attn.post_norm"), taps_exist)
    find_mlp(view, _behind_norm(view, mlp, "mlp.post_norm"))
    _norm_before(view, view.entry, attention, "attn.norm")
    _norm_before(view, middle or view.entry, mlp, "mlp.norm")


def _sums(view: LayerView) -> list[tuple[Leaf, Leaf | None]]:
    """(what is added to the stream, the stream after it; None where both are added at once), until the stream is the layer's
    output; empty where that is not reached."""
    outputs = {leaf.key: view.outermost(leaf.key) or leaf for leaf in view.hidden if not leaf.given}
    streams = {leaf.key: leaf for leaf in reversed(view.hidden) if leaf.given}
    parts: list[tuple[Leaf, Leaf | None]] = []
    stream = view.entry
    while True:
        later = [leaf for leaf in outputs.values() if leaf.order > stream.order]
        last = next((leaf for leaf in later if torch.equal(stream.rows_NC + leaf.rows_NC, view.exit.rows_NC)), None)
        if last is not None:
            return [*parts, (last, view.exit)]
        step = next(
            (
                (leaf, after)
                for after in sorted(streams.values(), key=lambda leaf: leaf.order)
                if after.order > stream.order and after.key not in (stream.key, view.exit.key)
                for leaf in later
                if leaf.order < after.order and torch.equal(stream.rows_NC + leaf.rows_NC, after.rows_NC)
            ),
            None,
        )
        if step is None or len(parts) > 2:
            return _parallel(view, later) if not parts else []
        parts.append(step)
        stream = step[1]


def _parallel(view: LayerView, outputs: list[Leaf]) -> list[tuple[Leaf, Leaf | None]]:
    entry, leaving = view.entry.rows_NC, view.exit.rows_NC
    for a, b in combinations(sorted(outputs, key=lambda leaf: leaf.order), 2):
        sums = (entry + (a.rows_NC + b.rows_NC), (entry + a.rows_NC) + b.rows_NC, (entry + b.rows_NC) + a.rows_NC)
        if any(torch.equal(total, leaving) for total in sums):
            attends = [any(path == part.module or path.startswith(f"{part.module}.") for path in view.seen.taps) for part in (a, b)]
            return [(b, None), (a, None)] if attends == [False, True] else [(a, None), (b, None)]
    return []


def _behind_norm(view: LayerView, part: Leaf, name: str) -> Leaf:
    """The part before its norm, which is noted, where what is added to the stream is a norm of it; else the part itself."""
    given, returned = operands(view.seen, part.module)
    if given is None or returned is None or not (kind := norm_kind(view.seen.modules[part.module], given.rows_NC, returned.rows_NC)):
        return part
    before = view.outermost(given.key)
    if before is None:
        return part
    view.guess(name, part, f"{kind} by its numbers, and added to the residual stream")
    view.name_weights(part.module, name)
    return before


def _norm_before(view: LayerView, stream: Leaf, part: Leaf, name: str) -> None:
    """The norm of the stream that a part of the layer reads."""
    for norm in view.norms(view.path):
        if norm.given.key == stream.key and norm.returned.order < part.order and norm.returned.layout != "(t h) d":
            readers = [leaf for leaf in view.hidden if leaf.given and leaf.key == norm.returned.key]
            if readers:
                evidence = f"{norm.kind} by its numbers, of the residual stream; {view.template(readers[0].module)} reads it"
                view.guess(name, norm.returned, evidence)
                view.name_weights(norm.module, name)
                return


# ------------------------------------------------------------------------------------------------ before and behind the layers


def _note(found: Findings, name: str, leaf: Leaf, evidence: str, **more: object) -> None:
    found.guesses[name] = {-1: Guess(leaf_binding(leaf, leaf.module, **more), evidence)}


def _inputs(seen: Observation, found: Findings) -> None:
    given = {"derived": "host"}
    found.guesses["input.ids"] = {-1: Guess(given, "the host knows them")}
    found.guesses["input.visible_from"] = {-1: Guess(given, "the host knows it, from mask and positions")}
    wanted = torch.arange(seen.columns)
    for leaf in seen.leaves:
        if leaf.tensor.is_floating_point() or not leaf.given or not leaf.module or seen.calls[leaf.module] != 1:
            continue
        if leaf.layout not in ("b s", "p b s"):
            continue
        position_NC = leaf.rows_NC.long().cpu()
        if (position_NC == wanted.repeat(len(position_NC) // len(wanted))[:, None]).all():
            shared = {"broadcast": "b"} if leaf.tensor.shape[-2] == 1 else {}
            _note(found, "input.positions", leaf, f"0 to {seen.columns - 1} for every sequence", **shared)
            return
    found.missing.append("input.positions: no module is given the positions; the host's own are recorded")
    found.guesses["input.positions"] = {-1: Guess(given, "no module is given them: those that the caller gave, or counted")}


def _rope_table(seen: Observation, found: Findings) -> None:
    tables = [path for path, module in seen.modules.items() if "inv_freq" in module._buffers]
    if len(tables) == 1:
        found.weights[f"{tables[0]}.inv_freq"] = WeightGuess(("rope.inv_freq",))


def _embedding(seen: Observation, found: Findings, first: LayerView) -> None:
    table = next((path for path, weight in _tables(seen) if path), "")
    makers = [leaf.module for leaf in seen.leaves if not leaf.given and leaf.key == first.entry.key and leaf.order < first.entry.order]
    said = f", bit for bit what {makers[0]} returned" if makers else ""
    _note(found, "embedding", first.entry, f"what enters the first layer{said}")
    if table:
        found.weights[f"{table}.weight"] = WeightGuess(("embedding.weight",))
    else:
        found.missing.append("embedding.weight: no module's output is the rows of its weight that the ids choose")


def _tables(seen: Observation) -> Iterator[tuple[str, torch.Tensor]]:
    """Modules that return the rows of their weight that the ids choose, times a number."""
    for path, module in seen.modules.items():
        weight = module._parameters.get("weight")
        leaves = seen.of(path)
        ids = next((leaf for leaf in leaves if leaf.given and not leaf.tensor.is_floating_point()), None)
        output = next((leaf for leaf in leaves if not leaf.given), None)
        if weight is None or weight.dim() != 2 or ids is None or output is None or not torch.equal(ids.tensor, seen.ids_BS):
            continue
        if output.layout == "b s c" and ratio_of(output.rows_NC, weight.detach()[seen.ids_BS.reshape(-1)]) is not None:
            yield path, weight


def _head(seen: Observation, found: Findings, last: LayerView) -> None:
    """Final norm, projection and logits."""
    stream = last.exit
    behind = [leaf for leaf in seen.leaves if leaf.order > stream.order and leaf.module]
    for leaf in behind:
        given, returned = operands(seen, leaf.module)
        if not leaf.given or leaf.key != stream.key or given is None or returned is None:
            continue
        if kind := norm_kind(seen.modules[leaf.module], given.rows_NC, returned.rows_NC):
            _note(found, "final_norm", returned, f"{kind} by its numbers, of what the last layer returned")
            for own in seen.modules[leaf.module]._parameters:
                found.weights[f"{leaf.module}.{own}"] = WeightGuess((f"final_norm.{own}",))
            stream = returned
            break
    else:
        found.missing.append("final_norm: no norm reads what the last layer returned")
    logits = next((leaf for leaf in seen.leaves if not leaf.module and leaf.leaf in ("output.logits", "output", "output[0]")), None)
    projection = next((leaf for leaf in behind if leaf.given and leaf.key == stream.key and _is_linear(seen, leaf.module)), None)
    raw = None if projection is None else operands(seen, projection.module)[1]
    if projection is not None:
        for own, tensor in seen.modules[projection.module]._parameters.items():
            if tensor is not None:
                found.weights[f"{projection.module}.{own}"] = WeightGuess((f"lm_head.{own}",))
    reads = "final_norm" if stream is not last.exit else "the last layer's output"
    if raw is not None and logits is not None and raw.key == logits.key:
        _note(found, "lm_head", raw, f"a linear map of {reads}, bit for bit the logits that the model returns")
    elif logits is not None and logits.layout:
        _note(found, "lm_head", logits, "the logits that the model returns")
        if raw is not None and raw.layout:
            _note(found, "lm_head.raw", raw, f"a linear map of {reads}; the model changes it before it returns logits (cap or scale)")
    elif raw is not None and raw.layout:
        _note(found, "lm_head", raw, f"a linear map of {reads}; the model's own output has no logits")
    else:
        found.missing.append("lm_head, scorer.logprobs: no logits in the model's output, and no linear map behind the final norm")
        return
    found.guesses["scorer.logprobs"] = {-1: Guess({"derived": "logprobs"}, "from lm_head")}


def _is_linear(seen: Observation, path: str) -> bool:
    given, returned = operands(seen, path)
    if given is None or returned is None:
        return False
    return bool(linear_kind(seen.modules[path], given.rows_NC, returned.rows_NC))

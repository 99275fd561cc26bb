"""The MLP or mixture-of-experts part of a layer, told by numbers. For ``suggested_blocks``.

Shape suffixes: N tokens, C columns, E experts, K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tracer.record.observed_forward import Leaf
from tracer.record.suggested_operators import activation_name, close
from tracer.record.suggestions import Guess, LayerView, Operator, WeightGuess

__all__ = ["find_mlp"]


def find_mlp(layer: LayerView, out: Leaf) -> None:
    """``mlp.*`` or ``moe.*`` of a layer whose second part returns ``out``."""
    scope = layer.scope(out)
    router = _router(layer, scope)
    if router is None and (several := _several(layer, scope)):
        layer.guess("moe.combine", out, f"added to the residual stream; {several}")
        layer.missing.append(f"moe.router_logits, moe.topk_ids, moe.topk_weights: {several}, but nothing in it shows who chooses")
        return
    if router is None:
        layer.guess("mlp.out", out, "added to the residual stream; nothing in it chooses experts")
        _dense(layer, scope, out)
        return
    layer.guess("moe.combine", out, "added to the residual stream; experts are chosen inside")
    layer.guess("moe.router_logits", router.logits, router.why_logits)
    layer.guess("moe.topk_ids", router.ids, router.why_ids, **router.ids_more)
    layer.guess("moe.topk_weights", router.weights, router.why_weights, **router.weights_more)
    _name_router(layer, router)
    _experts(layer, scope, router, out)


def _several(layer: LayerView, scope: str) -> str:
    """What shows that a block holds several experts, in words; "" where nothing does."""
    below = {path: module for path, module in layer.seen.modules.items() if path == scope or path.startswith(f"{scope}.")}
    if scope == layer.path:
        return ""
    for path, module in below.items():
        if any(p is not None and p.dim() > 2 and "conv" not in type(module).__name__.lower() for p in module._parameters.values()):
            return f"{layer.template(path)} holds stacked matrices"
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            return f"{layer.template(path)} is a list of {len(module)} like modules"
    return ""


# ------------------------------------------------------------------------------------------------ dense


def _dense(layer: LayerView, scope: str, out: Leaf) -> None:
    linears = layer.linears(scope)
    down = next((found for found in linears if found.returned.key == out.key), None)
    if down is None:
        layer.missing.append(f"mlp.act, mlp.gate_up: no linear map in {layer.template(scope)} returns mlp.out")
        return
    layer.name_weights(down.module, "mlp.down", transpose=down.kind == "transposed")
    layer.guess("mlp.act", down.given, f"{layer.template(down.module)} turns it into mlp.out: output = input x weight")
    act_NC, width = down.given.rows_NC, down.given.rows_NC.shape[1]
    before = [found for found in linears if found is not down and found.returned.order < down.given.order]
    halves = [found for found in before if found.returned.rows_NC.shape[1] == width]
    for gate in halves:
        for up in halves:
            if gate is not up and (name := activation_name(act_NC, gate.returned.rows_NC, up.returned.rows_NC)):
                _gate_up(layer, gate, up, name)
                return
    for found in before:
        returned_NC = found.returned.rows_NC
        if returned_NC.shape[1] == 2 * width and (name := activation_name(act_NC, returned_NC[:, :width], returned_NC[:, width:])):
            layer.guess("mlp.gate_up", found.returned, f"gate, then up: mlp.act = {name}(gate) * up")
            layer.name_weights(found.module, "mlp.gate", "mlp.up", transpose=found.kind == "transposed")
            return
        if returned_NC.shape[1] == width and (name := activation_name(act_NC, returned_NC, None)):
            layer.guess("mlp.up", found.returned, f"mlp.act = {name}(up), no gate")
            layer.name_weights(found.module, "mlp.up", transpose=found.kind == "transposed")
            return
    layer.missing.append("mlp.gate_up: no known activation turns the projections into mlp.act")


def _gate_up(layer: LayerView, gate: Operator, up: Operator, name: str) -> None:
    parts = [{"module": layer.template(found.module)} for found in (gate, up)]
    binding = {"parts": parts, "layout": gate.returned.layout}
    layer.guesses["layers.{layer}.mlp.gate_up"] = Guess(binding, f"gate, then up: mlp.act = {name}(gate) * up")
    for found, own in ((gate, "mlp.gate"), (up, "mlp.up")):
        layer.name_weights(found.module, own, transpose=found.kind == "transposed")


# ------------------------------------------------------------------------------------------------ mixture of experts


@dataclass(frozen=True)
class _Router:
    logits: Leaf
    ids: Leaf
    weights: Leaf
    why_logits: str
    why_ids: str
    why_weights: str
    ids_more: dict[str, object]
    weights_more: dict[str, object]


def _router(layer: LayerView, scope: str) -> _Router | None:
    """What chooses experts below a path: ids, weights and logits; None where nothing does, or where it is not clear."""
    leaves = [leaf for leaf in layer.leaves if leaf.module.startswith(f"{scope}.") and leaf.layout in ("t c", "b s c")]
    wide = [leaf for leaf in leaves if leaf.tensor.is_floating_point()]
    return _by_ids(layer, leaves, wide) or _by_scores(layer, wide)


def _by_ids(layer: LayerView, leaves: list[Leaf], wide: list[Leaf]) -> _Router | None:
    ids_of = [leaf for leaf in leaves if not leaf.tensor.is_floating_point() and leaf.tensor.dtype != torch.bool]
    for ids in sorted(ids_of, key=lambda leaf: (leaf.given, leaf.order)):
        ids_NK = ids.rows_NC.long()
        chosen = ids_NK.shape[1]
        experts = 1 + int(ids_NK.max())
        if int(ids_NK.min()) < 0 or chosen > 64 or any(len(set(row)) < chosen for row in ids_NK.tolist()):
            continue
        logits = [leaf for leaf in wide if not leaf.given and leaf.rows_NC.shape[1] >= max(experts, chosen + 1) and _is_router(layer, leaf)]
        logits = [leaf for leaf in logits if leaf.module == ids.module] or [leaf for leaf in logits if _are_top(ids_NK, leaf)]
        weights = [leaf for leaf in wide if leaf.module == ids.module and leaf.given == ids.given and leaf.rows_NC.shape[1] == chosen]
        if len({leaf.key for leaf in logits}) == 1 and len({leaf.key for leaf in weights}) == 1:
            count = logits[0].rows_NC.shape[1]
            order: dict[str, object] = {"canonical_order": "layers.{layer}.moe.topk_ids"}
            plain = _are_top(ids_NK, logits[0])
            how = f"the top {chosen} of moe.router_logits" if plain else "not simply the top of moe.router_logits: it adds something"
            return _Router(
                logits[0], ids, weights[0],
                f"{count} numbers per token, a linear map of the block's input",
                f"{chosen} different whole numbers below {count} per token: {how}",
                f"{chosen} numbers per token, beside the ids", order, order,
            )  # fmt: skip
    return None


def _by_scores(layer: LayerView, wide: list[Leaf]) -> _Router | None:
    """A router that returns a score per expert, 0 where not chosen."""
    for scores in wide:
        score_NE = scores.rows_NC
        kept = (score_NE != 0).sum(1)
        if scores.given or not len(kept) or not 0 < int(kept.min()) == int(kept.max()) < score_NE.shape[1]:
            continue
        chosen = int(kept.max())
        for logits in wide:
            if logits.given or logits.module != scores.module or logits.key == scores.key or logits.rows_NC.shape != score_NE.shape:
                continue
            if _are_top((score_NE != 0).nonzero()[:, 1].reshape(-1, chosen), logits):
                return _Router(
                    logits, scores, scores,
                    f"{score_NE.shape[1]} numbers per token, beside the scores",
                    f"{chosen} of the scores are not 0 in every row, at the top {chosen} of moe.router_logits",
                    f"{chosen} of the scores are not 0 in every row", {"chosen": "ids"}, {"chosen": "values"},
                )  # fmt: skip
    return None


def _are_top(ids_NK: torch.Tensor, logits: Leaf) -> bool:
    return torch.equal(logits.rows_NC.topk(ids_NK.shape[1]).indices.sort(1).values, ids_NK.sort(1).values)


def _is_router(layer: LayerView, leaf: Leaf) -> bool:
    """Whether a leaf is the product of what its module was given and the module's own weight, plus its bias."""
    module = layer.seen.modules[leaf.module]
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    given = next((other for other in layer.seen.of(leaf.module) if other.given and other.tensor.is_floating_point() and other.layout), None)
    if weight is None or weight.dim() != 2 or given is None or given.rows_NC.shape[1] != weight.shape[1]:
        return False
    expected = torch.nn.functional.linear(given.rows_NC.float(), weight.detach().float(), None if bias is None else bias.detach().float())
    return close(leaf.rows_NC, expected)


def _name_router(layer: LayerView, router: _Router) -> None:
    module = layer.seen.modules[router.logits.module]
    for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            layer.weights[layer.template(f"{router.logits.module}.{own}")] = WeightGuess((f"layers.{{layer}}.moe.router.{own}",))


def _experts(layer: LayerView, scope: str, router: _Router, out: Leaf) -> None:
    """Routed sum and shared expert, where the block adds them up; parameters stacked by expert."""
    experts = router.logits.rows_NC.shape[1]
    stacked = [
        path
        for path, module in layer.seen.modules.items()
        if path.startswith(f"{scope}.") and any(p is not None and p.dim() > 2 and len(p) == experts for p in module._parameters.values())
    ]
    if len(stacked) != 1:
        layer.missing.append(f"moe.routed_out: {len(stacked)} modules in {layer.template(scope)} hold parameters stacked by expert")
        return
    for own, tensor in layer.seen.modules[stacked[0]]._parameters.items():
        if tensor is not None and tensor.dim() > 1 and len(tensor) == experts:
            name = f"layers.{{layer}}.moe.experts.{{expert}}.{own}"
            layer.weights[layer.template(f"{stacked[0]}.{own}")] = WeightGuess((name,))
    whole_NC = out.rows_NC
    routed = next((leaf for leaf in layer.hidden if leaf.module == stacked[0] and not leaf.given), None)
    if routed is None or routed.key == out.key or torch.equal(routed.rows_NC, whole_NC):
        return
    others = [leaf for leaf in layer.hidden if leaf.module.startswith(f"{scope}.") and not leaf.given and leaf.module != stacked[0]]
    gates = [leaf for leaf in layer.leaves if leaf.module.startswith(f"{scope}.") and not leaf.given and leaf.layout and _one_column(leaf)]
    for shared in sorted(others, key=lambda leaf: leaf.module.count(".")):
        if torch.equal(routed.rows_NC + shared.rows_NC, whole_NC):
            layer.guess("moe.routed_out", routed, "moe.combine = it + moe.shared_out, bit for bit")
            layer.guess("moe.shared_out", shared, "moe.combine = moe.routed_out + it, bit for bit")
            _name_shared(layer, shared.module)
            return
        for gate in gates:
            if close(whole_NC, routed.rows_NC + torch.sigmoid(gate.rows_NC) * shared.rows_NC):
                layer.guess("moe.routed_out", routed, "moe.combine = it + sigmoid(moe.shared_gate) * moe.shared_expert")
                layer.guess("moe.shared_expert", shared, "moe.combine = moe.routed_out + sigmoid(moe.shared_gate) * it")
                layer.guess("moe.shared_gate", gate, "moe.combine = moe.routed_out + sigmoid(it) * moe.shared_expert")
                _name_shared(layer, shared.module)
                layer.name_weights(gate.module, "moe.shared_gate")
                return
    layer.missing.append("moe.routed_out, moe.shared_out: the experts' sum is not moe.combine, and no other output is what is missing")


def _one_column(leaf: Leaf) -> bool:
    return leaf.layout in ("t c", "b s c") and leaf.rows_NC.shape[1] == 1


def _name_shared(layer: LayerView, module: str) -> None:
    for own, _ in layer.seen.modules[module].named_parameters():
        layer.weights[layer.template(f"{module}.{own}")] = WeightGuess((f"layers.{{layer}}.moe.shared.{own}",))

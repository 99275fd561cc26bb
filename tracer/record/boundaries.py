"""From a boundary map and a model's module names to a plan: what to hook where, and why not elsewhere.

Pure: ``resolve`` sees names only, so it runs on text, on a laptop, and before any weight is loaded.
Maps are read by ``tracer.record.boundary_maps``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgspec

from tracer.errors import Code, MapError, UsageError
from tracer.format.schema import Boundary, BoundaryStatus, MapIdentity
from tracer.record.map_entries import Binding, BoundaryEntry, BoundaryMap, HostBindings, Part

__all__ = ["Plan", "Source", "WeightRule", "matches", "resolve"]


@dataclass(frozen=True)
class Source:
    """One place that one boundary, or a part of it, is taken from.

    ``boundary``: full name, ``layers.3.attn.q``. ``module``: path as ``Host.modules()`` names it, "" is the root.
    ``tap``: function tap of the host instead of a module hook; ``leaf`` is then the tap's name for the tensor.
    ``leaf``: ``output``, ``output[1]``, ``output.logits``, ``input[0]``, ``kwargs.hidden_states``. ``[i]`` indexes
    tuples and lists, and leaves a bare tensor as it is; ``.name`` is an attribute or a key. ``a|b`` is the first of them
    that is a tensor.
    ``layout``: one name or ``(a b)`` group per dimension, ``1`` for an empty one. Row axes are b, s, t and e, in the
    order written; all others are columns, in the order written. A row axis grouped with columns, ``(t h) d``, has as
    many rows as the forward. ``sizes``: sizes of axes the map states; a leaf that contradicts them is refused.
    ``broadcast``: row axis that may have size 1 and then stands for every index (position ids shared by a batch).
    ``part``, ``parts``: the leaf is column slice ``part`` of ``parts`` slices of the boundary (gate, then up).
    ``split``, ``shares``: the leaf is these boundaries side by side, with columns as
    ``Host.local_columns`` says, else in these proportions, else equal; this source takes the slice of ``boundary``.
    ``add``: a leaf added to this one, in the leaf's own dtype (deferred residual); None there means nothing to add.
    ``canonical_by``: ids boundary (perhaps this one) of the same module call whose ascending order, row by row,
    reorders this boundary's columns. ``select``: columns ``start:stop`` of the leaf, taken first. ``chosen``: the leaf has a
    column per choice, 0 where not chosen; the ``ids`` of the chosen columns, ascending, or their ``values``.
    ``shard``: (mesh axis, layout axis it cuts), a column axis or, under sequence and context parallelism, a row axis.
    ``order``: (row axis, contiguous | zigzag). ``replicated``, ``partial``: mesh axes over which copies are equal, or
    values are partial sums. ``after_root``: the module runs once the root has returned, in calls that share out the rows;
    all of them belong to the forward before, as one use. ``derived``: ``host`` (from ``Forward.ids_N`` and
    ``Forward.inputs``; no module) or
    ``logprobs`` (log softmax of this leaf, which is ``lm_head``'s, at the next token, float32, one column).
    """

    boundary: str
    module: str
    tap: str = ""
    leaf: str = "output"
    layout: str = ""
    part: int = 0
    parts: int = 1
    split: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    add: str = ""
    canonical_by: str = ""
    select: str = ""
    chosen: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    shard: tuple[tuple[str, str], ...] = ()
    order: tuple[tuple[str, str], ...] = ()
    replicated: tuple[str, ...] = ()
    partial: str = ""
    broadcast: str = ""
    after_root: bool = False
    derived: str = ""

    def describe(self) -> str:
        """For people: ``model.layers.3.mlp.gate output[0]``."""
        if self.derived == "host":
            return "given by the host"
        tap = f" {self.tap} tap" if self.tap else ""
        place = f"{self.module or 'root'}{tap} {self.leaf}"
        return f"log softmax of {place}" if self.derived else place


@dataclass(frozen=True)
class WeightRule:
    """What the parameters (or buffers) of one path pattern hold. Apply in this order:

    1. ``match(path)`` gives the semantic names, layer and expert filled in from the path.
    2. A name that still has ``{expert}`` means that dimension 0 of the parameter counts experts (global expert id,
       ``HostParameter.spans[0]``): take slice e, put e into the names.
    3. ``transpose``: a matrix is stored (in, out); turn it, so that its rows are output rows. A 1-D parameter stays.
    4. Several names: the rows (1-D: the elements) are these names' rows one after another, in proportions ``shares``,
       or equal ones where empty, unless the host knows better (``Host.local_columns`` of the boundary that the name
       belongs to). One name: all rows.

    A path that no rule matches keeps the host's own name, so that nothing is left out.
    """

    parameter: str
    names: tuple[str, ...]
    transpose: bool = False
    shares: tuple[int, ...] = ()

    def match(self, path: str) -> tuple[str, ...] | None:
        """Semantic names of the parameter at ``path``, or None where this rule is not about it."""
        found = _pattern(self.parameter).fullmatch(path)
        return tuple(_fill(name, **found.groupdict()) for name in self.names) if found else None


@dataclass(frozen=True)
class Plan:
    """A map resolved against one model.

    ``boundaries``: every boundary of the map in causal order with its static fields, status (recorded, not selected,
    not observable, elsewhere, unresolved) and reason. ``sources``: where the recorded ones are taken, in the same
    order, parts adjacent. ``unresolved``: (name, reason), selected or not. ``bound``: boundaries the host binds here.
    ``Boundary.weights`` may hold globs until ``with_weights`` has expanded them.
    """

    map: MapIdentity
    file: str
    level: int
    boundaries: tuple[Boundary, ...]
    sources: tuple[Source, ...]
    weight_rules: tuple[WeightRule, ...]
    unresolved: tuple[tuple[str, str], ...]
    bound: int

    @property
    def summary(self) -> str:
        """One line: how many boundaries resolved, and how many the host cannot show."""
        hidden = sum(boundary.status is BoundaryStatus.NOT_OBSERVABLE for boundary in self.boundaries)
        tail = f"; {hidden} not observable on {self.map.host}" if hidden else ""
        return f"{self.bound - len(self.unresolved)} of {self.bound} boundaries resolved{tail}"

    def require_resolved(self) -> None:
        """Raises MapError map-unfit if a selected boundary did not resolve, with every reason (ten at most)."""
        selected = {boundary.name for boundary in self.boundaries if boundary.status is BoundaryStatus.UNRESOLVED}
        lost = [(name, reason) for name, reason in self.unresolved if name in selected]
        if not lost:
            return
        more = f"\n    and {len(lost) - 10} more" if len(lost) > 10 else ""
        raise MapError(
            Code.MAP_UNFIT,
            f"boundary map {self.map.family} does not fit this model: {self.summary}",
            where=f"{self.file}: hosts.{self.map.host}.bindings",
            expected="modules at " + ", ".join(name for name, _ in lost[:10]),
            found="\n    ".join(f"{name}: {reason}" for name, reason in lost[:10]) + more,
            remedy="run `tracer map check`, choose another map, or correct this one",
        )

    def name_weights(self, path: str) -> tuple[WeightRule, tuple[str, ...]] | None:
        """The rule about the host's parameter at ``path`` and its semantic names; None where no rule is about it.

        What a wrapper or quantizer adds below a module whose weight has a name (``q_proj.lora_A.default.weight``,
        ``q_proj.weight_scale_inv``) is named like it: ``layers.0.attn.q.lora_A.default.weight``."""
        for rule in self.weight_rules:
            names = rule.match(path)
            if names is not None:
                return rule, names
        parts = path.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            owner = ".".join((*parts[:depth], "weight"))
            for rule in self.weight_rules:
                names = rule.match(owner) or ()
                if len(names) == 1 and names[0].endswith(".weight") and "{" not in names[0]:
                    name = f"{names[0].removesuffix('weight')}{'.'.join(parts[depth:])}"
                    return WeightRule(path, (name,)), (name,)
        return None

    def with_weights(self, names: Iterable[str]) -> tuple[Boundary, ...]:
        """``boundaries`` with ``Boundary.weights`` expanded to the semantic names that exist, each in the given order."""
        known = list(names)
        by_prefix: dict[str, list[str]] = {}
        for name in known:
            by_prefix.setdefault(_prefix(name), []).append(name)
        return tuple(
            msgspec.structs.replace(
                boundary,
                weights=tuple(
                    name
                    for glob in boundary.weights
                    for name in (by_prefix.get(_prefix(glob), []) if "*" not in _prefix(glob) else known)
                    if fnmatchcase(name, glob)
                ),
            )
            for boundary in self.boundaries
        )


def matches(name: str, glob: str) -> bool:
    """Whether a glob means this boundary: ``layers.*.`` at its start is any one layer, so that ``layers.*.residual`` is the
    output of every block and not ``attn.residual`` inside it."""
    if not glob.startswith("layers.*."):
        return fnmatchcase(name, glob)
    head, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    return head == "layers" and number.isdigit() and fnmatchcase(rest, glob.removeprefix("layers.*."))


def resolve(
    boundary_map: BoundaryMap,
    host: str,
    modules: Mapping[str, str],
    *,
    level: int = 1,
    boundaries: Sequence[str] | None = None,
    also: Sequence[str] = (),
    root_class: str = "",
) -> Plan:
    """The plan for a model whose modules are ``modules`` (path -> class name; "" is the root).

    ``boundaries``: globs over full names; where given they choose instead of ``level``. Inputs (``input.*``) are
    always chosen. ``also``: globs of what is chosen besides, whatever the level. ``root_class``: recorded as the map's
    identity, by default the class of the root.

    Raises MapError map-unfit (no bindings for the host, no layer found), UsageError bad-argument (level, or a glob
    that matches nothing). A boundary that does not resolve is no error here: see ``Plan.require_resolved``.
    """
    section = boundary_map.hosts.get(host)
    if section is None:
        raise MapError(
            Code.MAP_UNFIT,
            f"boundary map {boundary_map.family} has no bindings for host {host}",
            where=f"{boundary_map.file}: hosts",
            expected=", ".join(boundary_map.hosts) or "a host section",
            found=host,
            remedy=f"add hosts.{host} to the map, or choose another",
        )
    if level not in (0, 1, 2):
        raise UsageError(Code.BAD_ARGUMENT, "level must be 0, 1 or 2", expected="0, 1 or 2", found=str(level))
    layers = _find_layers(boundary_map, section, host, modules)
    resolved: list[Boundary] = []
    sources: list[Source] = []
    unresolved: list[tuple[str, str]] = []
    bound = 0
    for place in _places(boundary_map, section, layers, modules):
        boundary, found = _resolve_one(place, boundary_map, section, modules, layers)
        chosen = _chosen(boundary.name, boundary.level, level, boundaries) or any(matches(boundary.name, glob) for glob in also)
        bound += boundary.status in (BoundaryStatus.RECORDED, BoundaryStatus.UNRESOLVED)
        if boundary.status is BoundaryStatus.UNRESOLVED:
            unresolved.append((boundary.name, boundary.reason))
        if boundary.status in (BoundaryStatus.RECORDED, BoundaryStatus.UNRESOLVED) and not chosen:
            reason = "outside boundaries=" if boundaries is not None else f"level {boundary.level}"
            boundary = msgspec.structs.replace(boundary, status=BoundaryStatus.NOT_SELECTED, reason=reason)
        resolved.append(boundary)
        if boundary.status is BoundaryStatus.RECORDED:
            sources.extend(found)
    for glob in boundaries or ():
        if not any(fnmatchcase(boundary.name, glob) for boundary in resolved):
            raise UsageError(
                Code.BAD_ARGUMENT,
                f"boundaries={glob!r} matches no boundary of map {boundary_map.family}",
                expected="globs over names such as layers.*.attn.out",
                found=glob,
                remedy=f"`tracer map show {boundary_map.family}` lists the names",
            )
    return Plan(
        map=MapIdentity(family=boundary_map.family, host=host, root_class=root_class or modules.get("", ""), digest=boundary_map.digest()),
        file=boundary_map.file,
        level=level,
        boundaries=tuple(resolved),
        sources=tuple(sources),
        weight_rules=tuple(
            WeightRule(parameter, entry.names, entry.transpose, entry.shares) for parameter, entry in section.weights.items()
        ),
        unresolved=tuple(unresolved),
        bound=bound,
    )


# ------------------------------------------------------------------------------------------------ layers and kinds


@dataclass(frozen=True)
class _Layer:
    """One layer. ``kinds``: what it is; ``problem``: kind -> why the layer could not be told; ``elsewhere``: a stand-in."""

    index: int
    kinds: frozenset[str]
    problem: Mapping[str, str]
    elsewhere: bool


def _find_layers(boundary_map: BoundaryMap, section: HostBindings, host: str, modules: Mapping[str, str]) -> dict[int, _Layer]:
    """Layers by index, ascending."""
    if not any("{layer}" in name for name in boundary_map.boundaries):
        return {}
    pattern = _pattern(section.layers)
    indices = sorted({int(found["layer"]) for path in modules if (found := pattern.fullmatch(path))})
    if not indices:
        raise MapError(
            Code.MAP_UNFIT,
            f"boundary map {boundary_map.family} finds no layer in this model: 0 boundaries resolved",
            where=f"{boundary_map.file}: hosts.{host}.layers",
            expected=f"modules named {section.layers}",
            found=f"{modules.get('', 'a model')} with {len(modules)} modules: {', '.join(sorted(modules, key=len)[:6])} ...",
            remedy="choose the map of this model's family, or write one (docs/how-to/write-a-map.md)",
        )
    return {index: _layer(index, section, modules) for index in indices}


def _layer(index: int, section: HostBindings, modules: Mapping[str, str]) -> _Layer:
    kinds: set[str] = set()
    problem: dict[str, str] = {}
    elsewhere = modules[_fill(section.layers, layer=str(index))] in section.elsewhere
    for group in () if elsewhere else section.kinds.values():
        paths = {kind: _fill(selector, layer=str(index)) for kind, selector in group.items()}
        present = [kind for kind, path in paths.items() if (path.removeprefix("!") in modules) != path.startswith("!")]
        if len(present) == 1:
            kinds.update(present)
        else:
            seen = " and ".join(f"{kind} ({path})" for kind, path in paths.items() if kind in present)
            told = " or ".join(f"{path} ({kind})" for kind, path in paths.items())
            problem.update(dict.fromkeys(group, f"layer is {seen} at once" if present else f"layer has no module {told}"))
    return _Layer(index, frozenset(kinds), problem, elsewhere)


@dataclass(frozen=True)
class _Place:
    """One boundary of the map at one layer (or outside layers)."""

    key: str
    name: str
    entry: BoundaryEntry
    layer: _Layer | None


def _places(boundary_map: BoundaryMap, section: HostBindings, layers: Mapping[int, _Layer], modules: Mapping[str, str]) -> Iterator[_Place]:
    """Every boundary in causal order: before the layers, layer by layer, after them."""
    names = list(boundary_map.boundaries)
    inside = [n for n, name in enumerate(names) if "{layer}" in name]
    start, stop = (inside[0], inside[-1] + 1) if inside else (len(names), len(names))
    for key in names[:start]:
        yield _Place(key, key, boundary_map.boundaries[key], None)
    for layer in layers.values():
        for key in names[start:stop]:
            entry = boundary_map.boundaries[key]
            if not entry.kind or entry.kind in layer.kinds or entry.kind in layer.problem:
                yield _Place(key, _fill(key, layer=str(layer.index)), entry, layer)
    for key in names[stop:]:
        yield _Place(key, key, boundary_map.boundaries[key], None)


# ------------------------------------------------------------------------------------------------ one boundary


def _resolve_one(
    place: _Place, boundary_map: BoundaryMap, section: HostBindings, modules: Mapping[str, str], layers: Mapping[int, _Layer]
) -> tuple[Boundary, list[Source]]:
    """The boundary with status recorded, not observable, elsewhere or unresolved, and its sources."""
    binding = section.bindings[place.key]
    entry = place.entry
    status, reason, sources = BoundaryStatus.RECORDED, "", _sources(place, binding, section, modules)
    if binding.not_observable:
        status, reason, sources = BoundaryStatus.NOT_OBSERVABLE, binding.not_observable, []
    elif place.layer is not None and place.layer.elsewhere:
        status, reason = BoundaryStatus.ELSEWHERE, "the layer belongs to another pipeline stage"
    elif place.layer is not None and entry.kind in place.layer.problem:
        status, reason = BoundaryStatus.UNRESOLVED, place.layer.problem[entry.kind]
    else:
        for source in sources:
            if source.derived == "host":
                continue
            if source.module not in modules:
                status, reason = BoundaryStatus.UNRESOLVED, f"no module {source.module or '(the root)'}"
                break
            if modules[source.module] in section.elsewhere:
                status, reason = BoundaryStatus.ELSEWHERE, f"{source.module} belongs to another pipeline stage"
            elif modules[source.module] in section.passthrough and source.leaf.startswith("output"):
                status, reason = BoundaryStatus.NOT_OBSERVABLE, section.passthrough[modules[source.module]]
    layer = str(place.layer.index) if place.layer else ""
    boundary = Boundary(
        name=place.name,
        level=entry.level,
        inputs=tuple(_inputs(place, boundary_map, layers)),
        mixes_tokens=entry.mixes_tokens,
        discrete=entry.discrete,
        scores=_fill(entry.scores, layer=layer),
        rows=binding.rows or entry.rows,
        status=status,
        reason=reason,
        source=" + ".join(source.describe() for source in sources) if status is BoundaryStatus.RECORDED else "",
        weights=tuple(_fill(name, layer=layer) for name in entry.weights),
    )
    return boundary, sources


def _inputs(place: _Place, boundary_map: BoundaryMap, layers: Mapping[int, _Layer]) -> Iterator[str]:
    """Full names of what the boundary is computed from, those that the layer has."""
    seen: set[str] = set()
    for template in place.entry.inputs:
        layer = place.layer
        if "{last}" in template:
            layer = layers[max(layers)]
        elif "{previous}" in template:
            assert layer is not None
            if layer.index == 0:
                name = boundary_map.before_layers
                if name not in seen:
                    seen.add(name)
                    yield name
                continue
            layer = layers.get(layer.index - 1)
        key = template.replace("{previous}", "{layer}").replace("{last}", "{layer}")
        kind = boundary_map.boundaries[key].kind
        if kind and layer is not None and kind not in layer.kinds and kind not in layer.problem:
            continue
        index = str(place.layer.index - 1) if place.layer and "{previous}" in template else str(layer.index) if layer else ""
        name = _fill(key, layer=index)
        if name not in seen:
            seen.add(name)
            yield name


def _sources(place: _Place, binding: Binding, section: HostBindings, modules: Mapping[str, str]) -> list[Source]:
    """One source per part; none where the host cannot show the boundary."""
    if binding.not_observable:
        return []
    derived = binding.derived
    if derived == "host":
        return [Source(boundary=place.name, module="", leaf="", derived=derived)]
    if derived:
        binding = section.bindings["lm_head"]
    layer = str(place.layer.index) if place.layer else ""
    parts = binding.parts or (Part(module=binding.module or "", leaf=binding.leaf),)
    return [
        Source(
            boundary=place.name,
            module=_first_present(_fill(part.module, layer=layer), modules),
            tap=binding.tap,
            leaf=part.leaf,
            layout=part.layout or binding.layout,
            part=n,
            parts=len(parts),
            split=tuple(_fill(name, layer=layer) for name in binding.split),
            shares=binding.shares,
            add=binding.add,
            canonical_by=_fill(binding.canonical_order, layer=layer),
            select=binding.select,
            chosen=binding.chosen,
            sizes=tuple(binding.sizes.items()),
            shard=tuple(binding.shard.items()),
            order=tuple(binding.order.items()),
            replicated=binding.replicated,
            partial=binding.partial,
            broadcast=binding.broadcast,
            after_root=binding.after_root,
            derived=derived,
        )
        for n, part in enumerate(parts)
    ]


def _first_present(paths: str, modules: Mapping[str, str]) -> str:
    """The first of ``a|b`` that the model has; the whole text where it has none."""
    return next((path for path in paths.split("|") if path in modules), paths)


def _chosen(name: str, level: int, wanted: int, globs: Sequence[str] | None) -> bool:
    if name.startswith("input."):
        return True
    return level <= wanted if globs is None else any(fnmatchcase(name, glob) for glob in globs)


# ------------------------------------------------------------------------------------------------ templates


def _fill(template: str, **values: str) -> str:
    """``{layer}`` and ``{expert}`` replaced where a value is given."""
    for name, value in values.items():
        template = template.replace("{" + name + "}", value)
    return template


def _pattern(template: str) -> re.Pattern[str]:
    """Regular expression of a path template; placeholders are whole numbers, the same name the same number."""
    text, seen = "", set()
    for literal, name in re.findall(r"([^{]*)(?:\{(\w+)\})?", template):
        text += re.escape(literal)
        if name:
            text += f"(?P={name})" if name in seen else f"(?P<{name}>\\d+)"
            seen.add(name)
    return re.compile(text)


def _prefix(name: str) -> str:
    """What groups weights for lookup: ``layers.3`` or the first word."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]

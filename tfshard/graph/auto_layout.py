"""auto_layout_map: derives tensor-parallel layouts from the operations of a model."""

import collections
import dataclasses
import heapq
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.errors import LayoutError
from tfshard.graph.dim_rules import (
    PRODUCTS,
    Blocked,
    Contracted,
    Lookup,
    Summed,
    advance,
    elementwise_sources,
    needs_all,
    rearranged,
)
from tfshard.graph.model_graph import ModelGraph, trace
from tfshard.graph.model_specs import MeshLike, ModelOrSpecs, mesh_sizes
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MODEL_AXIS, MeshAxes
from tfshard.layouts.layout_map import KINDS, LayoutMap, VariableSpec, goes_with_kernel, is_in_4_bits, layer_dim

# A variable with a larger share of a model's bytes is worth sharding, even if it only makes an output.
LARGE_SHARE = 0.02

_WITH_ADAPTERS = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)

# The name of auto_layout_map as a strategy's layout map.
AUTO = "auto"

Place = tuple[str, int]
"""A dim of a variable, by path, or of a tensor, by name."""


@dataclasses.dataclass(kw_only=True)
class Travel:
    """The effects of sharding one dim of a variable.

    Attributes:
        source: The dim of the variable.
        first: The index of the first operation that uses the dim; travels are sorted by it.
        partners: Dims of other variables that are contracted with the dim: kernels to shard by rows.
        joined: Dims of other variables that are sharded together with the dim: biases, scales.
        looked_up: True if an operation looks up rows along the dim.
        returned: True if the dim reaches an output of the model.
        summed: The reason why the dim can be sharded only if experts are stacked along it: an operation sums over the
            dim. Empty if no operation does.
        multiplied: True if the variable is an operand of a product: a kernel.
        blocked: The reason why the dim cannot be sharded; empty if it can.
    """

    source: Place
    first: int
    partners: set[Place] = dataclasses.field(default_factory=set)
    joined: set[Place] = dataclasses.field(default_factory=set)
    looked_up: bool = False
    returned: bool = False
    summed: str = ""
    multiplied: bool = False
    blocked: str = ""

    @property
    def places(self) -> set[Place]:
        """All dims of variables that are sharded together with the source."""
        return {self.source} | self.partners | self.joined


def auto_layout_map(model: keras.Model, mesh: MeshLike, *, inputs: Any = None) -> LayoutMap:
    """Derive tensor-parallel layouts for a Keras or KerasHub model from its operations.

    The function calls the model once in a graph, where nothing is allocated. It follows the output dim of a kernel
    through the operations behind the kernel. If this dim is contracted with the input dim of another kernel, the first
    kernel is sharded by column, with its bias, and the second kernel by row. The rule is from Megatron-LM (Shoeybi et
    al. 2019, section 3). This covers the query, key, value and output projections of attention, and the two or three
    kernels of a feed-forward block, also in hand-written layers. Embedding tables are sharded over the vocabulary, with
    the logits that share their weights. Output matrices with more than 2% of the model's bytes are sharded by column.
    Stacked kernels of a mixture of experts are sharded by experts.

    Everything else stays replicated: normalizations, position embeddings, dims that do not divide. If the model has
    fewer key and value heads than devices (grouped-query attention), their projections stay replicated, as in
    Megatron-LM: each device computes all key and value heads, and uses the heads that its query heads need. For each
    large replicated variable, the map has an entry with the reason.

    Args:
        model: A built model, sharded or not; also a model from `tfshard.abstract_model`.
        mesh: A mesh from `tfshard.create_mesh`, or a mapping such as `{"batch": 2, "model": 4}`. The layouts shard over
            its only axis for tensor parallelism, or over `model` if it has several; without such an axis the map is
            empty.
        inputs: Example inputs, for models that do not know their inputs (subclassed models).

    Returns:
        An ordinary `LayoutMap` that you can print, change and give to a `ShardedStrategy`.

    Raises:
        LayoutError: The model is not built, or its inputs are not known; the mesh has several axes for tensor
            parallelism, but no `model` axis.

    Example:

    >>> import keras, tfshard
    >>> inputs = keras.Input((64,))
    >>> hidden = keras.layers.Dense(256, activation="gelu", name="up")(inputs)
    >>> model = keras.Model(inputs, keras.layers.Dense(64, name="down")(hidden))
    >>> print(tfshard.auto_layout_map(model, {"model": 4}))
    LayoutMap({
      'up': column over 'model',
      'down': row over 'model',
    })
    """
    sizes = mesh_sizes(mesh)
    axis = model_axis(sizes)
    if axis is None or sizes[axis] == 1:
        return LayoutMap()
    graph = trace(model, inputs)
    chosen, reasons = choose(graph, sizes[axis])
    return _as_layout_map(list(graph.variables.values()), chosen, reasons, axis)


def is_auto(layout_map: Any) -> bool:
    """Return True if a user's layout map is `"auto"`."""
    return isinstance(layout_map, str) and layout_map == AUTO


def resolve(layout_map: Any, model: ModelOrSpecs, mesh: MeshLike) -> LayoutMap:
    """Convert a user's layout map; `"auto"` becomes the map that is derived from the model.

    Raises:
        LayoutError: `layout_map` is not a layout map, or it is `"auto"` and `model` is not a model.
    """
    if not is_auto(layout_map):
        return LayoutMap.from_any(layout_map, mesh_sizes(mesh))
    if not isinstance(model, keras.Model):
        raise LayoutError(
            f"layout_map='auto' needs a keras.Model, because it reads the model's graph. Received: {model!r}"
        )
    return auto_layout_map(model, mesh)


def model_axis(sizes: Mapping[str, int]) -> str | None:
    """Return the axis for tensor parallelism: the only one, or `model` if there are several; None without one."""
    found = MeshAxes.of(sizes).tensor
    if MODEL_AXIS in found or not found:
        return MODEL_AXIS if found else None
    if len(found) > 1:
        raise LayoutError(
            "layout_map='auto' does not know which mesh axis is for tensor parallelism. Name one axis "
            f"'{MODEL_AXIS}'. Received: mesh axes {tuple(sizes)}"
        )
    return found[0]


def is_large(spec: VariableSpec, total_bytes: int) -> bool:
    """Return True if a variable has several dims and a large share of the bytes."""
    return len(spec.shape) > 1 and variable_layout.spec_bytes(spec) > LARGE_SHARE * total_bytes


def choose(graph: ModelGraph, devices: int) -> tuple[dict[str, int], dict[str, str]]:
    """Return the dim to shard of each variable, by path, and the reasons why large variables are not sharded.

    Args:
        graph: The model.
        devices: The size of the model axis.
    """
    specs = {spec.path: spec for spec in graph.variables.values()}
    total = sum(variable_layout.spec_bytes(spec) for spec in specs.values())
    origins = variable_places(graph)
    travels = [travel for name in graph.variables for travel in _travels(graph, name, devices, origins)]
    chosen: dict[str, int] = {}
    for travel in sorted(_candidates(travels, specs, total), key=lambda each: each.first):
        wanted = dict(sorted(travel.places))
        fits = len(wanted) == len(travel.places) and all(chosen.get(p, d) == d for p, d in travel.places)
        if fits and all(specs[path].shape[dim] % devices == 0 for path, dim in travel.places):
            chosen |= wanted
    chosen |= _with_kernels(specs.values(), chosen, devices)
    unread = {spec.path for name, spec in graph.variables.items() if name not in graph.consumers}
    for path in unread:
        # An unread variable may be the second table of a reversed embedding. For an unread kernel, nothing tells its
        # use: a loss may read the kernel.
        spec = specs[path]
        if isinstance(spec.layer, keras.layers.Embedding) and is_large(spec, total):
            dims = [dim for dim in range(len(spec.shape)) if spec.shape[dim] % devices == 0]
            if dims:
                chosen[path] = max(dims, key=lambda dim: spec.shape[dim])
    reasons = {
        path: _UNREAD
        if path in unread
        else _reason([travel for travel in travels if travel.source[0] == path], spec, devices)
        for path, spec in specs.items()
        if path not in chosen and is_large(spec, total)
    }
    return chosen, reasons


_UNREAD = "the model's call does not read it, and tfshard does not know how a custom loss or step uses it"


def _with_kernels(specs: Iterable[VariableSpec], chosen: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return the dims of LoRA matrices and scales that are sharded along with sharded kernels, by path."""
    kinds: dict[int, str] = {}
    for spec in specs:
        has_more = isinstance(spec.layer, _WITH_ADAPTERS) and len(spec.shape) > 1
        if spec.path in chosen and has_more and not goes_with_kernel(spec):
            kinds |= {id(spec.layer): kind for kind in KINDS if layer_dim(spec, kind) == chosen[spec.path]}
    found = {}
    for spec in specs:
        if spec.path not in chosen and goes_with_kernel(spec) and id(spec.layer) in kinds:
            dim = layer_dim(spec, kinds[id(spec.layer)])
            if dim is not None and spec.shape[dim] % devices == 0:
                found[spec.path] = dim
    return found


def variable_places(graph: ModelGraph) -> dict[Place, Place]:
    """Map the dims of rearranged or cast variables to the dims of the variables."""
    found: dict[Place, Place] = {}
    for name, spec in graph.variables.items():
        for dim in range(len(spec.shape)):
            found[name, dim] = (spec.path, dim)
    for operation in graph.operations:
        for number, tensor in enumerate(operation.inputs):
            for dim in range(tensor.shape.rank or 0):
                if (tensor.name, dim) in found:
                    for place in rearranged(operation, number, dim):
                        found.setdefault(place, found[tensor.name, dim])
    return found


def _travels(graph: ModelGraph, name: str, devices: int, origins: Mapping[Place, Place]) -> list[Travel]:
    """Follow each dim of a variable that `devices` divides."""
    spec = graph.variables[name]
    if len(spec.shape) < 2 or name not in graph.consumers:
        return []
    return [
        _follow(graph, name, dim, devices, origins)
        for dim, size in enumerate(spec.shape)
        if size % devices == 0 and size > 1
    ]


def _follow(graph: ModelGraph, name: str, dim: int, devices: int, origins: Mapping[Place, Place]) -> Travel:
    travel = Travel(source=(graph.variables[name].path, dim), first=graph.consumers[name][0][0])
    known = {(name, dim)}
    waiting = [(place, number, dim) for place, number in graph.consumers[name]]
    heapq.heapify(waiting)
    while waiting and not travel.blocked:
        place, number, at = heapq.heappop(waiting)
        operation = graph.operations[place]
        outcome = advance(operation, number, at, devices)
        of_source = origins.get((operation.inputs[number].name, at)) == travel.source
        travel.multiplied |= of_source and operation.type in PRODUCTS
        if isinstance(outcome, Blocked):
            travel.blocked = outcome.reason
        elif isinstance(outcome, Lookup):
            travel.looked_up = True
        elif isinstance(outcome, Summed):
            travel.summed = needs_all(operation)
        elif isinstance(outcome, Contracted):
            other = (operation.inputs[outcome.other].name, outcome.dim)
            if (operation.inputs[number].name, at) in origins or other not in origins:
                if other not in known:
                    travel.blocked = f"operation '{operation.name}' sums over it"
            else:
                travel.partners.add(origins[other])
        else:
            for other_number, other_dim in outcome.aligned:
                travel.joined |= _variables_of(operation.inputs[other_number], other_dim, origins) or set()
            for output, to in outcome.outputs:
                tensor = operation.outputs[output]
                if (tensor.name, to) in known:
                    continue
                known.add((tensor.name, to))
                travel.returned |= tensor.name in graph.outputs
                for consumer, consumer_number in graph.consumers.get(tensor.name, ()):
                    heapq.heappush(waiting, (consumer, consumer_number, to))
    travel.joined.discard(travel.source)
    return travel


def _variables_of(tensor: tf.Tensor, dim: int, origins: Mapping[Place, Place]) -> set[Place] | None:
    """Return the variable dims that make up a dim of a tensor elementwise, such as the scale of a normalization.

    Returns None if the tensor contains anything else.
    """
    if (tensor.name, dim) in origins:
        return {origins[tensor.name, dim]}
    if tensor.op.type == "Const":
        return set()
    sources = elementwise_sources(tensor.op, dim)
    if not sources:
        return None
    found: set[Place] = set()
    for number, place in sources:
        variables = _variables_of(tensor.op.inputs[number], place, origins)
        if variables is None:
            return None
        found |= variables
    return found


def _candidates(travels: Iterable[Travel], specs: Mapping[str, VariableSpec], total: int) -> list[Travel]:
    """Return the travels that are worth sharding and need no more communication than a row layer or a lookup."""
    found = []
    for travel in travels:
        spec = specs[travel.source[0]]
        if goes_with_kernel(spec):
            continue
        table = isinstance(spec.layer, keras.layers.Embedding)
        layers = [specs[path].layer for path, _ in travel.places]
        if any(_private.is_convolution(each) and not _private.can_shard_convolution(each) for each in layers):
            travel.blocked = "of convolutions, only Conv2D and Conv3D without groups can be sharded"
        if any(is_in_4_bits(each) for each in layers):
            travel.blocked = "layers quantized to 4 bits stay replicated"
        experts = bool(travel.summed) and travel.multiplied and _stacks_kernels(travel, specs)
        if travel.summed and not experts:
            travel.blocked = travel.blocked or travel.summed
        if travel.blocked:
            continue
        if experts:
            wanted = True
        elif travel.looked_up:
            wanted = table or is_large(spec, total)
        elif travel.partners:
            # Sharding a weight that is used as an activation, such as a pooling probe, or the width of a table would
            # shard the residual stream.
            wanted = travel.multiplied and not (table and travel.source[1] == 1 and spec.path.endswith("embeddings"))
        else:
            wanted = travel.returned and is_large(spec, total)
        if wanted:
            found.append(travel)
    return found


def _stacks_kernels(travel: Travel, specs: Mapping[str, VariableSpec]) -> bool:
    """Return True if kernels of experts are stacked along the dim, together with the joined variables."""
    path, dim = travel.source
    rank = len(specs[path].shape)
    others = [joined for joined, at in travel.joined if at == dim == 0 and len(specs[joined].shape) == rank]
    return rank >= 3 and bool(others)


def _reason(travels: list[Travel], spec: VariableSpec, devices: int) -> str:
    found = {travel.source[1]: travel.blocked for travel in travels}
    parts = []
    for dim, size in enumerate(spec.shape):
        if size % devices:
            parts.append(f"dim {dim} of size {size} is not divisible by {devices}")
        elif found.get(dim):
            parts.append(f"dim {dim}: {found[dim]}")
        else:
            parts.append(f"dim {dim}: no kernel can be sharded with it")
    return "; ".join(parts)


# --- From dims to patterns ----------------------------------------------------------------------------

# The kind of a rule with its axes. A rule for a replicated variable has the reason instead of axes.
_Rule = tuple[str, tuple[str | None, ...]]


def _as_layout_map(
    specs: list[VariableSpec], chosen: Mapping[str, int], reasons: Mapping[str, str], axis: str
) -> LayoutMap:
    """Build the layout map: column and row rules if they fit a layer, else rules for variables.

    Layers with names that differ only in numbers share a rule.
    """
    rules: dict[str, _Rule] = {}
    by_layer = collections.defaultdict(list)
    for spec in specs:
        by_layer[spec.path.rpartition("/")[0]].append(spec)
    for layer_path, members in by_layer.items():
        kind = _layer_rule(members, chosen)
        if kind is not None:
            rules[layer_path] = (kind, (axis,))
            continue
        for spec in members:
            if spec.path in chosen:
                dim = chosen[spec.path]
                rules[spec.path] = ("axes", tuple(axis if i == dim else None for i in range(dim + 1)))
            elif spec.path in reasons:
                rules[spec.path] = ("replicated", (reasons[spec.path],))
    layout_map = LayoutMap()
    everything = {*by_layer, *(spec.path for spec in specs)}
    for pattern, paths in _patterns(rules, everything).items():
        kind, axes = rules[paths[0]]
        if kind == "axes":
            layout_map[pattern] = axes
        elif kind == "replicated":
            layout_map.replicated(pattern, reason=str(axes[0]))
        else:
            getattr(layout_map, kind)(pattern, axis=axis)
    return layout_map


def _layer_rule(members: list[VariableSpec], chosen: Mapping[str, int]) -> str | None:
    """Return `"column"` or `"row"` if that rule gives exactly the chosen dims of a layer's variables, else None."""
    if not any(spec.path in chosen for spec in members) or isinstance(members[0].layer, keras.layers.Embedding):
        return None
    for kind in KINDS:
        try:
            if all(layer_dim(spec, kind) == chosen.get(spec.path) for spec in members):
                return kind
        except LayoutError:
            return None
    return None


def _patterns(rules: Mapping[str, _Rule], everything: set[str]) -> dict[str, list[str]]:
    """Map patterns to their paths. Numbers become `\\d+` if all paths that then match have the same rule."""
    loose = collections.defaultdict(list)
    for path in rules:
        loose[_loosened(path)].append(path)
    found: dict[str, list[str]] = {}
    for path in rules:
        pattern = _loosened(path)
        matching = [other for other in everything if re.fullmatch(pattern, other)]
        same = [other for other in matching if _rule_kind(rules.get(other)) == _rule_kind(rules[path])]
        if len(matching) > 1 and len(same) == len(matching):
            found.setdefault(pattern, loose[pattern])
        else:
            found[re.escape(path)] = [path]
    return found


def _rule_kind(rule: _Rule | None) -> _Rule | str | None:
    # Reasons name operations, which differ from layer to layer.
    return rule if rule is None or rule[0] != "replicated" else "replicated"


def _loosened(path: str) -> str:
    return re.sub(r"\d+", r"\\d+", re.escape(path))

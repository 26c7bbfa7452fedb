"""The layout linter: finds rules that are wrong, or that make a step send more than it has to, before it runs."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from tfshard import _private
from tfshard.errors import LayoutError, LayoutWarning, warn
from tfshard.graph import auto_layout, model_specs
from tfshard.graph.model_graph import ModelGraph, trace
from tfshard.graph.model_specs import MeshLike
from tfshard.layouts import layout_map as layout_maps
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import OWN_NAMES, Role, default_role, plain
from tfshard.layouts.config import ShardingConfig, ZeroStage
from tfshard.layouts.layout_map import Rule, VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.operations import unsupported
from tfshard.planning import activation_traffic

# How many errors compile shows.
_SHOWN = 8
_NAMED_ROLE = "named role"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault of a layout map.

    Attributes:
        kind: `"cannot be expanded"`, `"unmatched"`, `"tied"`, `"ambiguous"`, `"indivisible"`,
            `"unsupported"`, `"left whole"`, `"idle axis"`, `"column after column"`, `"transposed"`, `"unused sharding"`
            or `"named role"`.
        is_error: True if `compile` refuses the fault. `compile` warns of the others, except `"named role"`, which only
            `lint` reports.
        where: The pattern, the path of the variable, or the name of the layer or model.
        message: The fault and its fix.
    """

    kind: str
    is_error: bool
    where: str
    message: str

    def __str__(self) -> str:
        level = "error" if self.is_error else "note" if self.kind == _NAMED_ROLE else "warning"
        return f"{level} ({self.kind}) at {self.where}: {self.message}"


def lint(
    model: keras.Model,
    mesh: MeshLike,
    layout_map: Any = None,
    *,
    inputs: Any = None,
) -> tuple[Finding, ...]:
    """List the faults that `compile` would refuse in a model and a layout map, and slow layouts, without a device.

    Errors of the model are layers that DTensor cannot expand.

    Errors of the map are a pattern that matches nothing, and two rules for one weight (also by the names of two layers
    that share it). A dim that its axis does not divide is an error, as is a rule for the kernel of a convolution other
    than Conv2D and Conv3D. A matrix of more than 2% of the model's bytes without a rule is an error; if no rule uses a
    model axis, all matrices count together. `"auto"` that finds nothing is an error.

    Warnings are a model axis that shards nothing and, from the model's graph, three kinds of kernels. A kernel sharded
    by column may have an input that is already sharded: a row rule would save collectives. A kernel may be sharded
    along another dim than its neighbours ask for (transposed). The next operation may undo the sharding. `lint` also
    reports each axis that has its role from a name such as `dp` or `fsdp`.

    Args:
        model: A built model, also one from `tfshard.abstract_model`.
        mesh: A mesh, or a mapping from axis name to size.
        layout_map: The layout map, as for `ShardedStrategy`.
        inputs: An example of the model's inputs, for a subclassed model. If the inputs are unknown, `lint` looks for
            errors only.

    Returns:
        The findings, errors first.

    Raises:
        LayoutError: The layout map is invalid, or names an axis that the mesh does not have.

    >>> import keras, tfshard
    >>> inputs = keras.Input((64,))
    >>> hidden = keras.layers.Dense(256, activation="gelu", name="up")(inputs)
    >>> model = keras.Model(inputs, keras.layers.Dense(64, name="down")(hidden))
    >>> layout_map = tfshard.LayoutMap()
    >>> layout_map.column("up|down")
    >>> for finding in tfshard.lint(model, {"model": 4}, layout_map):
    ...     print(finding.kind, finding.where)
    column after column down/kernel
    """
    sizes = model_specs.mesh_sizes(mesh)
    automatic = auto_layout.is_auto(layout_map)
    layout_map = auto_layout.resolve(layout_map, model, sizes)
    layout_map.check_axes(sizes)
    config = ShardingConfig(layout_map=layout_map, zero_stage=ZeroStage.NOTHING)
    placement = ModelPlacement.of(model_specs.specs_of(model), config, mesh_shape=sizes)
    return judge(model, placement, inputs=inputs, automatic=automatic) + _role_findings(placement)


def judge(
    model: keras.Model,
    placement: ModelPlacement,
    *,
    inputs: Any = None,
    automatic: bool = False,
) -> tuple[Finding, ...]:
    """Lint a finished placement, as `lint` does.

    Args:
        model: A built model.
        placement: The layouts of its variables.
        inputs: As for `lint`.
        automatic: True if the layout map was `"auto"`.
    """
    findings = refusals(model, placement, automatic=automatic)
    if not any(finding.is_error for finding in findings):
        findings += _graph_findings(model, placement, inputs)
    return tuple(sorted(findings, key=lambda finding: not finding.is_error))


def refusals(model: keras.Model, placement: ModelPlacement, *, automatic: bool = False) -> list[Finding]:
    """Return the faults that `compile` and the first step would refuse.

    Args:
        model: A built model.
        placement: The layouts of its variables.
        automatic: True if the layout map was found for the model, because it was `"auto"`.
    """
    findings = model_findings(model)
    findings += _found_findings(placement) if automatic else []
    return findings + _rule_findings(model, placement) + _replicated_findings(placement) + _idle_findings(placement)


def check(model: keras.Model, placement: ModelPlacement) -> None:
    """Raise `LayoutError` with all errors at once, and warn of the other findings (`LayoutWarning`). `compile` calls
    this."""
    findings = tuple(found for found in judge(model, placement) if found.kind not in _OF_THE_MODEL)
    _raise_errors(model, findings)
    _warn(findings)


def check_found(model: keras.Model, placement: ModelPlacement) -> None:
    """Raise `LayoutError` if the map of `layout_map="auto"` shards nothing, and warn of an idle axis. `compile` calls
    this."""
    _raise_errors(model, _found_findings(placement))
    _warn(_idle_findings(placement))


def _warn(findings: Iterable[Finding]) -> None:
    for finding in findings:
        warn(f"{finding.kind}: {finding.where}: {finding.message}", LayoutWarning)


def _raise_errors(model: keras.Model, findings: Iterable[Finding]) -> None:
    errors = [finding for finding in findings if finding.is_error]
    if errors:
        lines = [f"- {finding.where}: {finding.message}" for finding in errors[:_SHOWN]]
        if len(errors) > _SHOWN:
            lines.append(f"- and {len(errors) - _SHOWN} more: see tfshard.lint(model, mesh, layout_map)")
        raise LayoutError(f"The layout map does not fit model '{model.name}':\n" + "\n".join(lines))


# The kinds of faults that do not depend on the layout map.
_OF_THE_MODEL = ("cannot be expanded",)


def model_findings(model: keras.Model) -> list[Finding]:
    """Return the faults of a model that `compile` and the first step refuse with any mesh and layout map.

    Args:
        model: A built model.
    """
    findings = []
    for layer in _private.flatten_layers(model):
        reason = unsupported.unsupported_reason(layer)
        if reason is not None:
            text = f"a {type(layer).__name__} cannot be sharded: {reason}. See: tfshard docs layers"
            where = f"layer '{layer.name}'"
            findings.append(Finding(kind="cannot be expanded", is_error=True, where=where, message=text))
    return findings


def shards_nothing(placement: ModelPlacement) -> bool:
    """Return whether a placement has a model axis of several devices, and its layout map shards nothing over it."""
    axis = auto_layout.model_axis(placement.mesh_shape)
    has_axis = axis is not None and placement.mesh_shape[axis] > 1
    return has_axis and not any(any(rule.axes) for rule in placement.layout_map.values())


def _found_findings(placement: ModelPlacement) -> list[Finding]:
    """Return a finding if `layout_map="auto"` found nothing to shard over a model axis."""
    layout_map, sizes = placement.layout_map, placement.mesh_shape
    axis = auto_layout.model_axis(sizes)
    if axis is None or not shards_nothing(placement):
        return []
    reasons = [f"'{pattern}': {rule.reason}" for pattern, rule in layout_map.items() if rule.reason][:_SHOWN]
    text = (
        "layout_map='auto' found nothing to shard over it. Each of its devices would hold and compute the same "
        "values. Leave the axis out of the mesh, such as create_mesh(batch=...), choose another size than "
        f"{sizes[axis]}, write a layout map, or allow it with layout_map={{'.*': ()}}. "
        + ("; ".join(reasons) or "The model has no matrices.")
    )
    return [Finding(kind="left whole", is_error=True, where=f"axis '{axis}'", message=text)]


def _rule_findings(model: keras.Model, placement: ModelPlacement) -> list[Finding]:
    """Find faults of the rules alone."""
    layout_map, specs = placement.layout_map, placement.specs
    findings, matched = [], set()
    for number, (spec, planned) in enumerate(zip(specs, placement.variables, strict=True)):
        patterns = layout_map.matching(spec)
        matched.update(patterns)
        if len(patterns) > 1:
            text = f"two rules for one weight: {patterns}. Keep one of them, or make the patterns disjoint."
            findings.append(Finding(kind="ambiguous", is_error=True, where=spec.path, message=text))
            continue
        if number in placement.faults:
            fault = placement.faults[number]
            findings.append(Finding(kind="indivisible", is_error=True, where=spec.path, message=fault))
            continue
        refused = _private.is_convolution(spec.layer) and not _private.can_shard_convolution(spec.layer)
        if refused and len(spec.shape) > 1 and any(planned.compute):
            text = (
                "DTensor expands no convolution whose kernel is sharded over a model axis, and tfshard replaces "
                "only Conv2D and Conv3D without groups and with channels last. Keep the kernel replicated there: "
                f"layout_map.replicated('{re.escape(spec.path)}'). ZeRO still shards it over the batch axis."
            )
            findings.append(Finding(kind="unsupported", is_error=True, where=spec.path, message=text))
    for pattern, rule in layout_map.items():
        if pattern in matched or rule.optional:
            continue
        tied = _tied(model, pattern)
        if tied is not None:
            alias, path = tied
            text = (
                f"it names '{alias}', which is the weight '{path}' under the name of another layer that shares it"
                + (f"; that has a rule already: {layout_map.matching(_spec(specs, path))}. Remove one of the two."
                   if layout_map.matching(_spec(specs, path)) else f". Write the rule for '{path}'.")
            )  # fmt: skip
            findings.append(Finding(kind="tied", is_error=True, where=pattern, message=text))
        else:
            text = _unmatched(pattern, rule, specs)
            findings.append(Finding(kind="unmatched", is_error=True, where=pattern, message=text))
    return findings


def _unmatched(pattern: str, rule: Rule, specs: tuple[VariableSpec, ...]) -> str:
    """Explain why a pattern matches no variable, and how to write it."""
    is_for_layers = rule.kind != "axes"
    variables = [spec.path for spec in specs]
    layers = [*dict.fromkeys(path.rpartition("/")[0] for path in variables)]
    variable, layer = _meant(pattern, variables), _meant(pattern, layers)
    if is_for_layers and variable is not None:
        owner = variable.path.rpartition("/")[0]
        return (
            f"it {variable.matched} variable '{variable.path}', but a {rule.kind} pattern names a layer. Write "
            f"layout_map.{rule.kind}('{owner}'), which shards the kernel and the bias of layer '{owner}'."
        )
    if not is_for_layers and layer is not None:
        inside = next(path for path in variables if path.rpartition("/")[0] == layer.path)
        layer_pattern = layer.path if layer.is_end else pattern
        return (
            f"it {layer.matched} layer '{layer.path}', but axes are given for variables. Write "
            f"layout_map['{inside}'] = {rule.axes}, or layout_map.column('{layer_pattern}') or .row('{layer_pattern}')."
        )
    found = layer if is_for_layers else variable
    if found is not None:
        kind = "layer" if is_for_layers else "variable"
        call = f"layout_map.{rule.kind}('{{}}')" if is_for_layers else f"layout_map['{{}}'] = {rule.axes}"
        wider = f".*/(?:{pattern})" if "|" in pattern else f".*/{pattern}"
        return (
            f"it {found.matched} {kind} '{found.path}', and a pattern must match the full path (re.fullmatch). Write "
            f"{call.format(found.path)}, or {call.format(wider)}."
        )
    near = _nearest(pattern, layers if is_for_layers else variables)
    if is_for_layers:
        return (
            f"it matches no layer that has variables. A {rule.kind} pattern must match the full path of a layer "
            f"(re.fullmatch). Correct it, or add it with optional=True. Similar layers: {near}"
        )
    return (
        "it matches no variable. A pattern must match the full path (re.fullmatch). Correct it, or add it with "
        f"optional=True. Similar variables: {near}"
    )


@dataclasses.dataclass(frozen=True)
class _Meant:
    """A path that a pattern probably means: the pattern matches the path, or only its end."""

    path: str
    is_end: bool

    @property
    def matched(self) -> str:
        """The words between "it" and the path."""
        return "matches the end of" if self.is_end else "matches"


def _meant(pattern: str, paths: Sequence[str]) -> _Meant | None:
    """Return the first path that a pattern matches, or else the first of which it matches the end."""
    for is_end in (False, True):
        form = f".*/(?:{pattern})" if is_end else pattern
        for path in paths:
            if re.fullmatch(form, path):
                return _Meant(path, is_end)
    return None


def _spec(specs: tuple[VariableSpec, ...], path: str) -> VariableSpec:
    return next(spec for spec in specs if spec.path == path)


def _tied(model: keras.Model, pattern: str) -> tuple[str, str] | None:
    """Return the name that a pattern gives a shared weight, and the weight's path. None if the pattern matches no other
    name."""
    for layer in _private.flatten_layers(model):
        path = layer.path or layer.name  # Keras gives no path to layers that build nothing, such as Dropout.
        for variable in _private.layer_variables(layer):
            alias = f"{path}/{variable.path.rpartition('/')[2]}"
            if alias != variable.path and (re.fullmatch(pattern, alias) or re.fullmatch(pattern, path)):
                return alias, variable.path
    return None


def _nearest(pattern: str, paths: Sequence[str]) -> list[str]:
    """Return the paths that share most words with a pattern, and then most letters."""

    def nearness(path: str) -> tuple[int, float]:
        shared = set(re.findall(r"[A-Za-z]+", pattern)) & set(re.findall(r"[A-Za-z]+", path))
        return len(shared), difflib.SequenceMatcher(None, pattern, path).ratio()

    return sorted(paths, key=nearness, reverse=True)[:3]


def _replicated_findings(placement: ModelPlacement) -> list[Finding]:
    """Find large matrices without a rule on a mesh with a model axis."""
    layout_map, specs, sizes = placement.layout_map, placement.specs, placement.mesh_shape
    axes = [axis for axis in sizes.tensor if sizes[axis] > 1]
    if not axes:
        return []
    total = sum(variable_layout.spec_bytes(spec) for spec in specs)
    used = {axis for rule in layout_map.values() for axis in rule.axes}
    matrices = [
        layout.spec
        for layout in placement.variables
        if len(layout.spec.shape) > 1 and layout.kind is None and not layout_map.matching(layout.spec)
    ]
    unmentioned = [spec for spec in matrices if auto_layout.is_large(spec, total)]
    # Sum all matrices: a deep model may have no single large matrix.
    left = sum(variable_layout.spec_bytes(spec) for spec in matrices)
    if left > auto_layout.LARGE_SHARE * total and not used & set(axes):
        text = (
            "nothing is sharded over it. Each of its devices would hold and compute the same values. Use "
            "layout_map='auto', write a layout map, or allow it with layout_map.replicated('.*')."
        )
        return [Finding(kind="left whole", is_error=True, where=f"axis '{axes[0]}'", message=text)]
    findings = []
    for spec in unmentioned:
        text = (
            f"{variable_layout.spec_bytes(spec) / total:.0%} of the model's bytes are replicated on every device of "
            f"axis '{axes[0]}'. Give it a rule, use layout_map='auto', or allow it with "
            f"layout_map.replicated('{re.escape(spec.path)}')."
        )
        findings.append(Finding(kind="left whole", is_error=True, where=spec.path, message=text))
    return findings


def _idle_findings(placement: ModelPlacement) -> list[Finding]:
    """Report each model axis that no rule names, if other model axes are named."""
    sizes, rules = placement.mesh_shape, placement.layout_map.values()
    used = {axis for rule in rules for axis in rule.axes}
    if not used:
        return []  # `_replicated_findings` and `_found_findings` look at this case, and rules may allow it.
    findings = []
    for axis in sizes.tensor:
        if sizes[axis] == 1 or axis in used:
            continue
        text = (
            f"no rule shards a variable over it, and the batch is not sharded over it, so its {sizes[axis]} devices "
            "compute the same values. To give them different samples, give the axis the role 'data': "
            f"tfshard.create_mesh(..., roles={{'{axis}': 'data'}}). Otherwise write rules for the axis, or leave it "
            f"out of the mesh. Roles: {plain(sizes.roles)}"
        )
        findings.append(Finding(kind="idle axis", is_error=False, where=f"axis '{axis}'", message=text))
    return findings


def _role_findings(placement: ModelPlacement) -> tuple[Finding, ...]:
    """Report the role of each axis that has a name of another library, such as `dp`."""
    effects = {
        Role.DATA: "its devices take different samples, and the ZeRO stages shard over it",
        Role.REPLICA: "its devices take different samples, and each holds a copy of the shards",
        Role.PIPELINE: "its devices take different layers",
        Role.CONTEXT: "its devices take different positions of the same sequences",
    }
    return tuple(
        Finding(
            kind=_NAMED_ROLE,
            is_error=False,
            where=f"axis '{axis}'",
            message=(
                f"has the role '{role}', as its name says: {effects[role]}. If you do not want this, give another "
                f"role: tfshard.create_mesh(..., roles={{'{axis}': 'tensor'}})"
            ),
        )
        for axis, role in placement.mesh_shape.roles.items()
        if axis not in OWN_NAMES and role is default_role(axis) and role in effects
    )


def _graph_findings(model: keras.Model, placement: ModelPlacement, inputs: Any) -> list[Finding]:
    """Find the faults that the layouts cause in the model's graph."""
    findings: list[Finding] = []
    graph: ModelGraph | None = None
    for axis in placement.mesh_shape.tensor:
        dims, size = variable_layout.sharded_dims(placement.variables, axis), placement.mesh_shape[axis]
        if size == 1 or not dims:
            continue
        if graph is None:
            try:
                graph = trace(model, inputs)
            except LayoutError:
                # The inputs of a subclassed model are unknown, or it refuses these: skip the graph.
                return findings
        findings += _axis_findings(graph, dims, axis, size)
    return findings


def _axis_findings(graph: ModelGraph, dims: Mapping[str, int], axis: str, size: int) -> list[Finding]:
    shapes = {spec.path: spec.shape for spec in graph.variables.values()}
    asked, _ = auto_layout.choose(graph, size)

    def axes(path: str, dim: int) -> str:
        return str(tuple(axis if i == dim else None for i in range(len(shapes[path]))))

    findings: dict[str, Finding] = {}
    # A registered layer may pair its kernels, which can be sharded instead.
    registered = {spec.path for spec in graph.variables.values() if layout_maps.is_registered(spec.layer)}
    for path, dim in dims.items():
        if path in registered:
            continue
        if path in asked and asked[path] != dim and path not in findings:
            text = (
                f"it is sharded along dim {dim} of {shapes[path]}, but the model's operations need dim "
                f"{asked[path]}: the layout is transposed. Use layout_map['{path}'] = {axes(path, asked[path])}."
            )
            findings[path] = Finding(kind="transposed", is_error=False, where=path, message=text)
    for obstacle in activation_traffic.predict(graph, dims, size).obstacles:
        kernel = obstacle.kernel
        if kernel is None or not obstacle.arrives_sharded:
            where = kernel or obstacle.operation
            text = (
                f"{obstacle.reason}: it sends more than a row layer after each column layer would. "
                "See layout_map='auto'."
            )
            findings.setdefault(where, Finding(kind="unused sharding", is_error=False, where=where, message=text))
            continue
        layer = kernel.rpartition("/")[0]
        text = (
            "the column layer before it already shards its input, which is gathered for this layer. As a row layer, "
            f"it needs one all-reduce of its output instead: layout_map.row('{re.escape(layer)}')."
        )
        findings[kernel] = Finding(kind="column after column", is_error=False, where=kernel, message=text)
    return list(findings.values())

"""LayoutMap: path patterns to the mesh axes that shard the dims of variables.

Pure Python: no TensorFlow operation runs here.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import keras
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.errors import LayoutError, warn
from tfshard.layouts.axes import BATCH_AXIS, MODEL_AXIS, MeshAxes, axis_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableSpec:
    """The facts from which a layout is decided; no value is needed.

    Attributes:
        path: The Keras path, such as `"block_0/up/kernel"`.
        shape: The shape of the full variable.
        dtype: The dtype's name, such as `"float32"`.
        trainable: True if the optimizer updates the variable.
        layer: The Keras layer of the variable, if known: column and row rules depend on its type.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    layer: keras.layers.Layer | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def is_kernel_of_dense(self) -> bool:
        """True for the kernel of a known Dense or EinsumDense layer."""
        return isinstance(self.layer, (keras.layers.Dense, keras.layers.EinsumDense)) and self.path.endswith("kernel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """An entry of a `LayoutMap`.

    Attributes:
        kind: `"axes"`, `"column"` or `"row"`.
        axes: For `"axes"`, the mesh axis of each dim (None: not sharded); else the one axis to shard over.
        optional: True if the pattern may match nothing.
        reason: Why variables stay replicated; only for reading.
        stores: True if the data axis in `axes` shards the stored variable at every ZeRO stage, as in Keras on JAX.
            Otherwise, the data axis only names the dim that a stage shards.
    """

    kind: str
    axes: tuple[str | None, ...]
    optional: bool = False
    reason: str = ""
    stores: bool = False


# The mesh axis, or None, of each dim, as a user gives the axes.
GivenAxes: TypeAlias = Iterable[str | None] | keras.distribution.TensorLayout


class LayoutMap(Mapping[str, Rule]):
    """Assigns mesh axes to the dims of variables, by regular expressions on their paths.

    A pattern must match the full path (`re.fullmatch`), as in `keras.distribution.LayoutMap`. A pattern that equals the
    path takes precedence. If two patterns match one variable, that is an error. If no pattern matches a variable, the
    variable is replicated over the model axis. If a pattern matches nothing in the model, that is an error, unless the
    pattern was added with `optional=True`.

    Example: an MLP block as in Megatron-LM (Shoeybi et al. 2019, section 3). The first kernel is split by columns and
    the second by rows, which needs one all-reduce forward and one backward.

    >>> import tfshard
    >>> layout_map = tfshard.LayoutMap()
    >>> layout_map.column("block_.*/up")
    >>> layout_map.row("block_.*/down")
    >>> layout_map["token_embedding/embeddings"] = ("model", None)
    >>> list(layout_map)
    ['block_.*/up', 'block_.*/down', 'token_embedding/embeddings']
    """

    def __init__(
        self,
        rules: Mapping[str, GivenAxes]
        | dtensor.Mesh
        | keras.distribution.LayoutMap
        | keras.distribution.DeviceMesh
        | None = None,
    ):
        """Make a layout map.

        Args:
            rules: Initial entries, pattern to tuple of axis names; also a `keras.distribution.LayoutMap`. Or, as in
                `keras.distribution.LayoutMap`, the mesh of the rules: a mesh from `tfshard.create_mesh` or a
                `keras.distribution.DeviceMesh`. With a mesh, the map checks the axes of each rule when the rule is
                added, and a strategy without a mesh uses this mesh.

        Raises:
            LayoutError: `rules` is not a mapping or a mesh, or a rule does not fit.
        """
        self._rules: dict[str, Rule] = {}
        self._mesh: dtensor.Mesh | None = rules if isinstance(rules, dtensor.Mesh) else None
        self._mesh_axes: Mapping[str, int] = {} if self._mesh is None else axis_sizes(self._mesh)
        # Names of axes in the mesh to names of axes here.
        self._names: dict[str, str] = {}
        if isinstance(rules, keras.distribution.DeviceMesh):
            self._names = _keras_axis_names(rules)
            self._mesh_axes = {
                self._names[axis]: int(size) for axis, size in zip(rules.axis_names, rules.shape, strict=True)
            }
        elif self._mesh is None and rules is not None:
            if not isinstance(rules, Mapping):
                raise LayoutError(
                    "LayoutMap takes no argument, a mapping from pattern to axes, or a mesh "
                    f"(tfshard.create_mesh(...) or a keras.distribution.DeviceMesh). Received: {rules!r} (of type "
                    f"{type(rules)})"
                )
            for pattern, axes in rules.items():
                self[pattern] = axes

    @classmethod
    def from_any(cls, layout_map: Any, mesh_shape: Mapping[str, int] | None = None) -> "LayoutMap":
        """Convert None, a `LayoutMap`, a `keras.distribution.LayoutMap` or `ModelParallel`, or a plain mapping.

        For Keras's objects, the axis that shards the data becomes the data axis of the mesh, under any name. This axis
        is the `batch_dim_name` of a `ModelParallel`. For a `keras.distribution.LayoutMap`, it is the axis `batch` of
        its mesh, else the first axis, which `ModelParallel` would use.

        Args:
            layout_map: The user's argument.
            mesh_shape: The axes of the mesh that the map is for. By default the data axis is `batch`.
        """
        if layout_map is None:
            return cls()
        if isinstance(layout_map, cls):
            return layout_map
        given = _private.model_parallel_layout_map(layout_map)
        if isinstance(given, Mapping):
            names = _keras_axis_names(layout_map, mesh_shape)
            created = cls()
            for pattern, axes in given.items():
                created[pattern] = axes
                rule = created[pattern]
                renamed = tuple(None if axis is None else names.get(axis, axis) for axis in rule.axes)
                created._rules[pattern] = dataclasses.replace(rule, axes=renamed, optional=bool(names))
            if names and ".*" not in created:
                # In Keras's maps a pattern may match nothing, and a variable without a pattern stays replicated.
                created.replicated(".*", optional=True)
            return created
        raise LayoutError(
            "layout_map must be a tfshard.LayoutMap, a keras.distribution.LayoutMap or ModelParallel, a mapping from "
            f"pattern to axes, 'auto', or None. Received: layout_map={layout_map!r} (of type {type(layout_map)})"
        )

    @staticmethod
    def mesh_axes_of(layout_map: Any) -> Mapping[str, int] | None:
        """Return the axes (name to size) of the mesh that a layout map brings; None if it brings none.

        A `keras.distribution` object and a `LayoutMap` that was made from a mesh bring a mesh. The names are the names
        in `from_any`.
        """
        if isinstance(layout_map, LayoutMap):
            return layout_map._mesh_axes or None
        names, mesh = _keras_axis_names(layout_map), _keras_mesh(layout_map)
        return (
            {names[axis]: int(size) for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)} if mesh else None
        )

    def __setitem__(self, pattern: str, axes: GivenAxes) -> None:
        """Shard the dims of the variables with a path that `pattern` matches over `axes`."""
        axes = getattr(axes, "axes", axes)  # keras.distribution.TensorLayout
        if (
            not isinstance(axes, Iterable)
            or isinstance(axes, str)
            or not all(axis is None or isinstance(axis, str) for axis in axes)
        ):
            raise LayoutError(
                "A layout is a tuple with one mesh axis name or None for each dim, such as (None, 'model'). "
                f"Received: axes={axes!r} for pattern '{pattern}'"
            )
        self._add(pattern, Rule(kind="axes", axes=tuple(axes)))

    def add(self, pattern: str, axes: tuple[str | None, ...], *, optional: bool = False) -> None:
        """Add a rule like `layout_map[pattern] = axes`; with `optional=True` the pattern may match nothing."""
        self[pattern] = axes
        self._rules[pattern] = dataclasses.replace(self._rules[pattern], optional=optional)

    def pin(self, path: str, axes: tuple[str | None, ...]) -> None:
        """Shard the variable with this path over `axes`, whatever other rules say. The data axis stores it sharded."""
        self._rules[path] = Rule(kind="axes", axes=axes, optional=True, stores=True)

    def storing(self) -> "LayoutMap":
        """Return a copy in which the data axis of each rule shards the stored variable at every ZeRO stage."""
        created = LayoutMap()
        created._mesh, created._mesh_axes, created._names = self._mesh, self._mesh_axes, self._names
        created._rules = {pattern: dataclasses.replace(rule, stores=True) for pattern, rule in self._rules.items()}
        return created

    def replicated(self, pattern: str, *, reason: str = "", optional: bool = False) -> None:
        """Keep variables replicated over the model axes, also large variables, which `lint` reports without a rule.

        Any other rule takes precedence: `layout_map.replicated(".*")` covers all variables without a rule.

        Args:
            pattern: Regular expression that must match the full path of the variable.
            reason: Why; printed with the map.
            optional: True if the pattern may match nothing.
        """
        self._add(pattern, Rule(kind="axes", axes=(), optional=optional, reason=reason))

    def whole(self, pattern: str, *, reason: str = "", optional: bool = False) -> None:
        """Call `replicated`, the name since 0.3, and warn."""
        warn("LayoutMap.whole is called LayoutMap.replicated since tfshard 0.3.", DeprecationWarning)
        self.replicated(pattern, reason=reason, optional=optional)

    def column(self, pattern: str, *, axis: str = MODEL_AXIS, optional: bool = False) -> None:
        """Shard the output dim of kernels, and the biases, of the layers with a path that `pattern` matches.

        Known layers: Dense, EinsumDense (its first output-only dim), Conv1D to Conv3D, their transposes, DepthwiseConv,
        Embedding (the vector dim), `tfshard.layers.SketchedDense`. The scales of a quantized kernel and the second
        matrix of LoRA are sharded with the kernel. Layers quantized to 4 bits stay replicated.

        Args:
            pattern: Regular expression that must match the full path of the layer, such as `".*/query"`.
            axis: The mesh axis.
            optional: True if the pattern may match no layer.
        """
        self._add(pattern, Rule(kind="column", axes=(axis,), optional=optional))

    def row(self, pattern: str, *, axis: str = MODEL_AXIS, optional: bool = False) -> None:
        """Shard the input dim of the kernels of the layers with a path that `pattern` matches; biases stay replicated.

        Known layers: the layers of `column`; for an Embedding the input dim is the vocabulary. The first matrix of LoRA
        is sharded with the kernel.

        Args:
            pattern: Regular expression that must match the full path of the layer, such as `".*/output"`.
            axis: The mesh axis.
            optional: True if the pattern may match no layer.
        """
        self._add(pattern, Rule(kind="row", axes=(axis,), optional=optional))

    def _add(self, pattern: str, rule: Rule) -> None:
        if pattern in self._rules:
            raise LayoutError(f"Pattern '{pattern}' is already in the layout map, as {self._rules[pattern]}.")
        try:
            re.compile(pattern)
        except re.error as e:
            raise LayoutError(f"'{pattern}' is not a regular expression: {e}.") from None
        if self._mesh_axes:
            renamed = tuple(None if axis is None else self._names.get(axis, axis) for axis in rule.axes)
            rule = dataclasses.replace(rule, axes=renamed)
            _check_axes(pattern, rule, self._mesh_axes)
        self._rules[pattern] = rule

    def __delitem__(self, pattern: str) -> None:
        del self._rules[pattern]

    def __getitem__(self, pattern: str) -> Rule:
        return self._rules[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    @property
    def mesh(self) -> dtensor.Mesh | None:
        """The `tfshard.create_mesh` mesh that the map was made from; None without one."""
        return self._mesh

    def __repr__(self) -> str:
        lines = [f"  {pattern!r}: {_describe(rule)}," for pattern, rule in self._rules.items()]
        return "\n".join(["LayoutMap({", *lines, "})"]) if lines else "LayoutMap({})"

    def check_axes(self, mesh_shape: Mapping[str, int]) -> None:
        """Raise `LayoutError` if a rule names an axis that the mesh does not have."""
        for pattern, rule in self._rules.items():
            _check_axes(pattern, rule, mesh_shape)

    def match(self, spec: VariableSpec) -> "tuple[str, tuple[str | None, ...]] | None":
        """Return the pattern that applies to a variable and the axes that it gives, or None.

        Raises:
            LayoutError: Two patterns match, the layout is longer than the variable's rank, or a column or row rule
                meets an unknown layer.
        """
        pattern = self._matching_pattern(spec)
        if pattern is None:
            return None
        rule = self._rules[pattern]
        if rule.kind == "axes":
            if len(rule.axes) > len(spec.shape):
                raise LayoutError(
                    f"The layout for '{spec.path}' has more dims than the variable. Variable: shape={spec.shape}. "
                    f"Received: axes={rule.axes} for pattern '{pattern}'"
                )
            return pattern, rule.axes + (None,) * (len(spec.shape) - len(rule.axes))
        dim = layer_dim(spec, rule.kind, pattern)
        return pattern, tuple(rule.axes[0] if i == dim else None for i in range(len(spec.shape)))

    def matching(self, spec: VariableSpec) -> list[str]:
        """Return the patterns that match a variable: in a valid map, at most one."""
        if spec.path in self._rules and self._rules[spec.path].kind == "axes":
            return [spec.path]
        layer_path = spec.path.rpartition("/")[0]
        found = [
            pattern
            for pattern, rule in self._rules.items()
            if re.fullmatch(pattern, spec.path if rule.kind == "axes" else layer_path)
        ]
        # A rule that shards takes precedence over a rule that replicates.
        return [pattern for pattern in found if self._rules[pattern].axes] or found[:1]

    def _matching_pattern(self, spec: VariableSpec) -> str | None:
        matching = self.matching(spec)
        if len(matching) > 1:
            raise LayoutError(
                f"Variable '{spec.path}' matches several patterns of the layout map: {matching}. "
                "Make the patterns disjoint: each variable may match one."
            )
        return matching[0] if matching else None


def _check_axes(pattern: str, rule: Rule, mesh_shape: Mapping[str, int]) -> None:
    for axis in rule.axes:
        if axis is not None and axis not in mesh_shape:
            raise LayoutError(
                f"Axis '{axis}' is not in the mesh. Mesh axes: {tuple(mesh_shape)}. "
                f"Received: axes={rule.axes} for pattern '{pattern}'"
            )


def _keras_mesh(layout_map: Any) -> keras.distribution.DeviceMesh | None:
    """Return the `keras.distribution.DeviceMesh` of a layout map, distribution or mesh; None without one."""
    if isinstance(layout_map, keras.distribution.DeviceMesh):
        return layout_map
    if isinstance(layout_map, (keras.distribution.LayoutMap, keras.distribution.ModelParallel)):
        return layout_map.device_mesh
    return None


def _keras_axis_names(layout_map: Any, mesh_shape: Mapping[str, int] | None = None) -> dict[str, str]:
    """Map axis names of a `keras.distribution` mesh to names here: the axis that shards the data is the data axis."""
    mesh = _keras_mesh(layout_map)
    if mesh is None:
        return {}
    batch = getattr(layout_map, "batch_dim_name", None)
    if batch is None:
        batch = BATCH_AXIS if BATCH_AXIS in mesh.axis_names else mesh.axis_names[0]
    data = MeshAxes.of(mesh_shape or {}).data or BATCH_AXIS
    if batch != data and data in mesh.axis_names:
        raise LayoutError(
            f"tfshard calls the axis that shards the data '{data}', but the DeviceMesh has another axis of that "
            f"name. Rename that axis. Mesh axes: {tuple(mesh.axis_names)}. Received: batch_dim_name={batch!r}"
        )
    return {axis: data if axis == batch else axis for axis in mesh.axis_names}


def _describe(rule: Rule) -> str:
    if rule.kind != "axes":
        text = f"{rule.kind} over {rule.axes[0]!r}"
    elif any(rule.axes):
        text = repr(rule.axes)
    else:
        text = "replicated" + (f" ({rule.reason})" if rule.reason else "")
    return text + (" (optional)" if rule.optional else "")


# The kinds of rules for layers.
KINDS = ("column", "row")

# The first matrix of an adapter is sharded with the input of a kernel, the second with its output.
_DENSE_DIMS: dict[str, dict[str, int]] = {
    "column": {"kernel": 1, "kernel_scale": 0, "lora_kernel_b": 1},
    "row": {"kernel": 0, "lora_kernel_a": 0},
}
# The reverse embedding of an untied ReversibleEmbedding is (vector, vocabulary).
_EMBEDDING_DIMS: dict[str, dict[str, int]] = {
    "column": {"embeddings": 1, "reverse_embeddings": 0, "lora_embeddings_b": 1},
    "row": {"embeddings": 0, "reverse_embeddings": 1, "lora_embeddings_a": 0},
}


# Extension point: the dim that a rule shards, by the variable's name and whether it is a column rule.
LayerDims: TypeAlias = Callable[[str, bool], int | None]
_registered: dict[type, LayerDims] = {}


def register_layer(cls: type, dims: LayerDims) -> None:
    """Let column and row rules shard the variables of a layer class.

    Args:
        cls: A subclass of `keras.Layer`.
        dims: Takes the last part of a variable's path, and True for a column rule or False for a row rule. Returns the
            dim to shard, or None for a variable that stays replicated.
    """
    _registered[cls] = dims


def is_registered(layer: keras.layers.Layer | None) -> bool:
    """Return True if the class of a layer was registered with `register_layer`."""
    return _registered_dims(layer) is not None


def _registered_dims(layer: keras.layers.Layer | None) -> LayerDims | None:
    return next((dims for cls, dims in _registered.items() if isinstance(layer, cls)), None)


def goes_with_kernel(spec: VariableSpec) -> bool:
    """Return True for a matrix of LoRA, and for the scale or zero point of a quantized kernel."""
    name = spec.path.rpartition("/")[2]
    return name.startswith("lora_") or (not spec.trainable and name.endswith(("_scale", "_zero")))


def is_in_4_bits(layer: keras.layers.Layer | None) -> bool:
    """Return True if a layer is quantized to 4 bits.

    Its kernel stays replicated over model axes. Keras unpacks the kernel and looks its scales up in a table, which
    DTensor cannot expand if the rows are sharded.
    """
    return getattr(layer, "quantization_mode", None) == "int4"


def layer_dim(spec: VariableSpec, kind: str, pattern: str = "") -> int | None:
    """Return the dim that a column or row rule shards; None for a variable that stays replicated under the rule.

    Raises:
        LayoutError: A layer for which no rule is known.
    """
    name = spec.path.rpartition("/")[2]
    column = kind == "column"
    layer, rank = spec.layer, len(spec.shape)
    if is_in_4_bits(layer):
        return None
    if isinstance(layer, keras.layers.EinsumDense):
        return _einsum_dense_dim(layer, name, rank, column)
    if name == "bias":
        return 0 if column else None
    registered = _registered_dims(layer)
    if registered is not None:
        return registered(name, column)
    if isinstance(layer, keras.layers.Embedding):
        return _EMBEDDING_DIMS[kind].get(name)
    if isinstance(layer, keras.layers.Dense):
        return _DENSE_DIMS[kind].get(name)
    if name in ("kernel", "depthwise_kernel"):
        if isinstance(
            layer, (keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose)
        ):
            return rank - 2 if column else rank - 1
        if isinstance(layer, (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)):
            return rank - 2  # The input dim of a depthwise kernel is the output dim.
        if isinstance(layer, (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)):
            return rank - 1 if column else rank - 2
    raise LayoutError(
        f"No {kind} rule is known for variable '{spec.path}' of layer type {type(layer).__name__}. Known layers: "
        "Dense, EinsumDense, Embedding, Conv1D to Conv3D, their transposes, DepthwiseConv, SketchedDense. Give the "
        f"axes of its dims instead: layout_map['{spec.path}'] = (...). Received: {kind} for pattern '{pattern}'"
    )


def _einsum_dense_dim(layer: keras.layers.EinsumDense, name: str, rank: int, column: bool) -> int | None:
    """Return the dim of an EinsumDense variable that a rule shards.

    A column rule shards the first kernel label that only the output has, a row rule the first contracted label.
    "abc,cde->abde" (a query projection) gives d by column and c by row.
    """
    inputs, kernel, output = re.split(",|->", layer.equation.replace(" ", ""))
    output_only = next((label for label in kernel if label in output and label not in inputs), None)
    contracted = next((label for label in kernel if label in inputs and label not in output), None)
    label = output_only if column else contracted
    if label is None:
        return None
    if name == "kernel":
        return kernel.index(label)
    if name == "lora_kernel_a":
        return kernel.index(label) if label != kernel[-1] else None
    if name == "lora_kernel_b":
        return 1 if label == kernel[-1] else None
    if name == "kernel_scale" and column:
        return output.index(label) - (len(output) - rank)  # The dims of the scale are the last dims of the output.
    if name == "bias" and column and label in (layer.bias_axes or ""):
        # The bias has the output's dims, from the first of bias_axes.
        first = min(output.index(axis) for axis in layer.bias_axes)
        return output.index(label) - first
    return None

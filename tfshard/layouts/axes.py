"""The axes of a mesh: names, sizes and roles. Pure Python."""

import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping

from tensorflow.experimental import dtensor

from tfshard.errors import MeshError

# The default names of axes.
BATCH_AXIS = "batch"
REPLICA_AXIS = "replica"
MODEL_AXIS = "model"
PIPELINE_AXIS = "pipeline"
CONTEXT_AXIS = "context"
OWN_NAMES = (BATCH_AXIS, REPLICA_AXIS, CONTEXT_AXIS, MODEL_AXIS, PIPELINE_AXIS)


class Role(str, enum.Enum):
    """The role of a mesh axis."""

    __str__ = str.__str__  # Messages and JSON show "data", not `Role.DATA`.

    DATA = "data"
    """Devices along it have other samples of a batch, and the ZeRO stages store what they share in shards."""
    REPLICA = "replica"
    """Devices along it have other samples, too, and hold the same: what the data axis stores in shards is stored once
    for each of them. It is for the slowest links, such as those between hosts."""
    TENSOR = "tensor"
    """Devices along it share the work of one layer: the layout map says which dims they shard."""
    PIPELINE = "pipeline"
    """Devices along it have other layers: each of its places is a mesh of the other axes, for one part of a model."""
    CONTEXT = "context"
    """Devices along it have other positions of the same sequences. The ZeRO stages shard over it as over the data
    axis."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """A mesh axis with its name, its number of devices, and its role."""

    name: str
    size: int
    role: Role


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MeshAxes(Mapping[str, int]):
    """The axes of a mesh: a mapping from name to size, in mesh order, that knows the role of each axis.

    Functions that take a mapping such as `{"batch": 2, "model": 4}` take a `MeshAxes`, too. A `MeshAxes` equals a plain
    mapping if the names of the axes imply the same roles.

    Example:

    >>> axes = MeshAxes.of({"dp": 2, "tp": 4}, roles={"dp": "data", "tp": "tensor"})
    >>> axes["tp"], axes.data, axes.data_size, axes.tensor
    (4, 'dp', 2, ('tp',))
    >>> MeshAxes.of({"batch": 2, "model": 4}).data
    'batch'

    A replica axis is merged into the data axis, because the devices of both axes shard the batch. The replica index is
    the major index of the merged axis.

    >>> hybrid = MeshAxes.of({"replica": 2, "batch": 4})
    >>> hybrid, dict(hybrid), hybrid.data_size, hybrid.replicas, hybrid.shards
    ({'replica': 2, 'batch': 4}, {'batch': 8}, 8, 2, 4)

    A context axis is merged into the data axis, too. The context index is the minor index.

    >>> axes = MeshAxes.of({"batch": 2, "context": 4})
    >>> axes, dict(axes), axes.data_size, axes.contexts, axes.sample_shards
    ({'batch': 2, 'context': 4}, {'batch': 8}, 8, 4, 2)

    Attributes:
        axes: The axes in order, as DTensor has them.
        replica: The name of the replica axis; None without one.
        replicas: How many copies of the data axis's shards the mesh stores.
        context: The name of the context axis; None without one.
        contexts: How many devices share a sequence.
    """

    axes: tuple[MeshAxis, ...]
    replica: str | None = None
    replicas: int = 1
    context: str | None = None
    contexts: int = 1

    @classmethod
    def of(cls, axes: Mapping[str, int], roles: Mapping[str, str] | None = None) -> "MeshAxes":
        """Return the axes of a mapping from name to size.

        Args:
            axes: Name to size. A `MeshAxes` keeps its roles.
            roles: Name to role, such as `"data"` or `"tensor"`, for axes with a role that the name does not imply. By
                default `batch`, `data`, `dp` and `fsdp` are for data, `replica` is for replicas, `context` and `cp` are
                for context parallelism, `pipeline` and `pp` are for pipelines, and every other name is for tensor
                parallelism.

        Raises:
            MeshError: A size that is not a positive integer; an unknown role or axis in `roles`; two axes for data,
                replicas or context; replicas or context without an axis for data.
        """
        if isinstance(axes, cls) and roles is None:
            return axes
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(
                    f"The size of mesh axis '{name}' must be a positive integer. Received: axes={dict(axes)}"
                )
        if isinstance(axes, cls) and isinstance(roles, Mapping):
            roles = {**axes.roles, **roles}
            axes = axes.given
        found = roles_of(axes, roles)
        replica = next((name for name, role in found.items() if role is Role.REPLICA), None)
        context = next((name for name, role in found.items() if role is Role.CONTEXT), None)
        replicas = 1 if replica is None else axes[replica]
        contexts = 1 if context is None else axes[context]
        sizes = {
            name: size * replicas * contexts if found[name] is Role.DATA else size
            for name, size in axes.items()
            if name not in (replica, context)
        }
        made = tuple(MeshAxis(name=name, size=size, role=found[name]) for name, size in sizes.items())
        return cls(made, replica=replica, replicas=replicas, context=context, contexts=contexts)

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    @functools.cached_property
    def given(self) -> dict[str, int]:
        """Name to size as a user gives them: the replica axis before the data axis, the context axis behind it."""
        found: dict[str, int] = {}
        for name, size in self._sizes.items():
            if name != self.data:
                found[name] = size
                continue
            if self.replica is not None:
                found[self.replica] = self.replicas
            found[name] = size // (self.replicas * self.contexts)
            if self.context is not None:
                found[self.context] = self.contexts
        return found

    @functools.cached_property
    def roles(self) -> dict[str, Role]:
        """Name to role of the axes in `given`."""
        found = {axis.name: axis.role for axis in self.axes}
        if self.replica is not None:
            found[self.replica] = Role.REPLICA
        if self.context is not None:
            found[self.context] = Role.CONTEXT
        return {name: found[name] for name in self.given}

    def with_role(self, role: Role) -> tuple[str, ...]:
        """Return the names of the axes with `role`, in mesh order."""
        return tuple(axis.name for axis in self.axes if axis.role == role)

    @property
    def shards_by_several(self) -> bool:
        """True if more than one axis has several devices."""
        return sum(size > 1 for size in self.values()) > 1

    def gathers_by_reduction(self, axis: str) -> bool:
        """Return True if DTensor gathers over `axis` by an all-reduce of local shards padded with zeros.

        DTensor does so on a mesh of several axes, except over the data axis, which shards variables.
        """
        return self.shards_by_several and axis != self.data

    @functools.cached_property
    def data(self) -> str | None:
        """The axis that shards batches and, with ZeRO, variables; None without one."""
        return next(iter(self.with_role(Role.DATA)), None)

    @property
    def data_size(self) -> int:
        """The size of the data axis; 1 without one."""
        return 1 if self.data is None else self[self.data]

    @property
    def shards(self) -> int:
        """The number of shards of a ZeRO-sharded tensor: the devices of the data axis in one replica."""
        return self.data_size // self.replicas

    @property
    def sample_shards(self) -> int:
        """The number of devices with different samples: of the devices that share sequences, one counts."""
        return self.data_size // self.contexts

    @functools.cached_property
    def tensor(self) -> tuple[str, ...]:
        """The axes for tensor parallelism."""
        return self.with_role(Role.TENSOR)

    @property
    def has_tensor_parallelism(self) -> bool:
        """True if an axis for tensor parallelism has several devices."""
        return any(self[axis] > 1 for axis in self.tensor)

    @functools.cached_property
    def pipeline(self) -> str | None:
        """The pipeline axis; None without one."""
        return next(iter(self.with_role(Role.PIPELINE)), None)

    @property
    def of_a_rank(self) -> "MeshAxes":
        """The mesh axes of one pipeline rank: all other axes, or a data axis of size 1 if none is left."""
        sizes = {name: size for name, size in self.given.items() if name != self.pipeline}
        roles = {name: self.roles[name] for name in sizes}
        return MeshAxes.of(sizes or {BATCH_AXIS: 1}, roles)

    @property
    def has_default_roles(self) -> bool:
        """True if every axis has the role that its name implies."""
        return all(role == default_role(name) for name, role in self.roles.items())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        same_roles = self.roles == other.roles if isinstance(other, MeshAxes) else self.has_default_roles
        return self.given == (other.given if isinstance(other, MeshAxes) else dict(other)) and same_roles

    def __hash__(self) -> int:
        return hash((frozenset(self.axes), self.replicas, self.contexts))

    def __repr__(self) -> str:
        # Equal to a dict, so shown as a dict.
        return repr(self.given) if self.has_default_roles else f"MeshAxes.of({self.given}, roles={plain(self.roles)})"


# Names of axes in other libraries. Every other name is an axis for tensor parallelism.
_ROLES_OF_NAMES = {
    **dict.fromkeys((BATCH_AXIS, "data", "data_parallel", "dp", "dp_shard", "fsdp"), Role.DATA),
    **dict.fromkeys((REPLICA_AXIS, "dp_replicate"), Role.REPLICA),
    **dict.fromkeys((PIPELINE_AXIS, "pipeline_parallel", "pp"), Role.PIPELINE),
    **dict.fromkeys((CONTEXT_AXIS, "context_parallel", "cp"), Role.CONTEXT),
}


def default_role(name: str) -> Role:
    """Return the role that the name of an axis implies; `Role.TENSOR` for an unknown name."""
    return _ROLES_OF_NAMES.get(name.lower(), Role.TENSOR)


def plain(roles: Mapping[str, Role]) -> dict[str, str]:
    """Return roles as strings, for JSON and messages."""
    return {name: str(role) for name, role in roles.items()}


def roles_of(axes: Mapping[str, int], roles: Mapping[str, str] | None = None) -> dict[str, Role]:
    """Return the role of each axis.

    Args:
        axes: Name to size; the sizes do not matter.
        roles: As for `MeshAxes.of`.

    Raises:
        MeshError: Invalid roles, as for `MeshAxes.of`.
    """
    roles = {} if roles is None else roles
    if not isinstance(roles, Mapping):
        raise MeshError(
            "roles must be a mapping from the name of an axis to its role, such as {'dp': 'data', 'tp': 'tensor'}. "
            f"Received: roles={roles!r} (of type {type(roles)})"
        )
    found = {name: default_role(name) for name in axes}
    for name, role in roles.items():
        if name not in axes:
            raise MeshError(
                f"roles names axis {name!r}, which is not in the mesh. Mesh axes: {tuple(axes)}. "
                f"Received: roles={dict(roles)}"
            )
        if role not in list(Role):
            raise MeshError(
                f"Unknown role of mesh axis '{name}'. Roles: {[str(each) for each in Role]}. "
                f"Received: roles={dict(roles)}"
            )
        found[name] = Role(role)
    for_data = tuple(name for name, role in found.items() if role is Role.DATA)
    if len(for_data) > 1:
        raise MeshError(
            f"Only one axis of a mesh can have the role 'data', but {for_data} have it, by their names or roles. "
            f"Give one of them another role, such as roles={{'{for_data[0]}': 'replica'}} for hybrid sharding. "
            f"Received: axes={dict(axes)}, roles={dict(roles)}"
        )
    of_pipelines = tuple(name for name, role in found.items() if role is Role.PIPELINE)
    if len(of_pipelines) > 1:
        raise MeshError(
            f"A mesh can have at most one axis with the role 'pipeline', but {of_pipelines} have it. Received: "
            f"axes={dict(axes)}, roles={dict(roles)}"
        )
    of_replicas = tuple(name for name, role in found.items() if role is Role.REPLICA)
    if len(of_replicas) > 1 or (of_replicas and not for_data):
        raise MeshError(
            f"A mesh can have at most one replica axis, together with a data axis, such as {{'{REPLICA_AXIS}': 2, "
            f"'{BATCH_AXIS}': 4}}. Received: axes={dict(axes)}, roles={dict(roles)}"
        )
    of_contexts = tuple(name for name, role in found.items() if role is Role.CONTEXT)
    if len(of_contexts) > 1 or (of_contexts and not for_data):
        raise MeshError(
            f"A mesh can have at most one context axis, together with a data axis, such as {{'{BATCH_AXIS}': 1, "
            f"'{CONTEXT_AXIS}': 4}}. Received: axes={dict(axes)}, roles={dict(roles)}"
        )
    if of_contexts and of_pipelines:
        raise MeshError(
            "A mesh cannot have a context axis and a pipeline axis. Use the devices of one of them for the batch or "
            f"the model axis. Received: axes={dict(axes)}, roles={dict(roles)}"
        )
    return found


# The name of a DTensor mesh encodes replicas and the roles that axis names do not imply. DTensor carries the name
# along: in the meshes of layouts and tensors, in comparisons, in copies and pickles. DTensor uses the name only to look
# up an order of TPU cores. A mesh with any other name, such as a mesh from dtensor.create_mesh, has default roles.
_ROLES, _REPLICAS, _CONTEXTS = "tfshard_roles=", "tfshard_replicas=", "tfshard_contexts="


def mesh_name(mesh_axes: MeshAxes) -> str:
    """Return the name of a DTensor mesh with these axes."""
    parts = []
    if not mesh_axes.has_default_roles:
        parts.append(_ROLES + ",".join(axis.role for axis in mesh_axes.axes))
    if mesh_axes.replica is not None:
        parts.append(f"{_REPLICAS}{mesh_axes.replica},{mesh_axes.replicas}")
    if mesh_axes.context is not None:
        parts.append(f"{_CONTEXTS}{mesh_axes.context},{mesh_axes.contexts}")
    return ";".join(parts)


def axis_sizes(mesh: dtensor.Mesh) -> MeshAxes:
    """Return the axes of a DTensor mesh with their sizes and roles, in mesh order."""
    return _axes_of(mesh.name, tuple(mesh.dim_names), tuple(mesh.shape()))


@functools.cache
def _axes_of(name: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> MeshAxes:
    axes, roles = dict(zip(names, sizes, strict=True)), None
    for part in name.split(";"):
        if part.startswith(_ROLES):
            roles = dict(zip(names, part.removeprefix(_ROLES).split(","), strict=True))
        elif part.startswith(_REPLICAS):
            replica, replicas = part.removeprefix(_REPLICAS).split(",")
            data = MeshAxes.of(axes, roles).data
            assert data is not None
            axes = {replica: int(replicas), **axes, data: axes[data] // int(replicas)}
            roles = {**({} if roles is None else roles), replica: Role.REPLICA}
        elif part.startswith(_CONTEXTS):
            context, contexts = part.removeprefix(_CONTEXTS).split(",")
            data = next(name for name, role in roles_of(axes, roles).items() if role is Role.DATA)
            axes = {**axes, data: axes[data] // int(contexts), context: int(contexts)}
            roles = {**({} if roles is None else roles), context: Role.CONTEXT}
    made = MeshAxes.of(axes, roles)
    if tuple(made.items()) != tuple(zip(names, sizes, strict=True)):
        created = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise MeshError(
            "A DTensor mesh has no replica axis and no context axis: in tfshard, the data axis spans their devices. "
            f"Create the mesh with tfshard.create_mesh({created}). Received: a mesh with the axes {axes}"
        )
    return made

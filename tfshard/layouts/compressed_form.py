"""CompressedForm: how the gradient of a variable is compressed, what that keeps between steps, and what it sends.

Devices that exchange compressed gradients are the replicas where a mesh has some: what a device has is added up in its
replica first, exactly, and a device of each replica exchanges a piece of the sum. Else they are all devices.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.compression import Compression, PowerSGD
from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.variable_layout import BLOCK_ELEMENTS, Axes, VariableLayout

# Of a block of codes of 8 bits: the codes, and the scale behind them.
BLOCK_WORDS = BLOCK_ELEMENTS // 4 + 1
_WORD_BYTES = 4

# What is kept between steps, by name: of each device what it has not sent so far; and of what it has added up, what it
# has not sent to the others. Of PowerSGD besides: the factor that a step begins with, and how many steps there were.
ERROR, SUM_ERROR, FACTOR, STEPS = "error", "sum_error", "factor", "steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective of a compressed gradient.

    Attributes:
        kind: As of a `Collective`.
        between_replicas: Whether it runs between replicas; else over the data axis, in replicas if there are some.
        bytes: Of the whole tensor on one device.
        what: For people.
    """

    kind: str
    between_replicas: bool
    bytes: int
    what: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedForm:
    """How the gradient of a variable is compressed.

    Attributes:
        compression: `"bfloat16"`, `"int8"` or a `PowerSGD`.
        shape: Of the gradient.
        dim: The dim that the data axis shards in the result; None for one that is whole on each device.
        axis: The data axis.
        replicas: How often what is sharded is stored.
        shards: In how many pieces.
    """

    compression: str | PowerSGD
    shape: tuple[int, ...]
    dim: int | None
    axis: str
    replicas: int
    shards: int

    @property
    def devices(self) -> int:
        """Of the data axis."""
        return self.replicas * self.shards

    @property
    def adders(self) -> int:
        """How many devices add up exactly what they have: those of a replica."""
        return self.shards if self.replicas > 1 else 1

    @property
    def exchanging(self) -> int:
        """How many devices exchange what is compressed."""
        return self.devices // self.adders

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def piece(self) -> int:
        """Elements of what a device compresses: of the gradient, or of the piece that it has added up."""
        return -(-self.elements // self.adders)

    @property
    def chunk(self) -> int:
        """Elements of what a device gets of each of the others."""
        return -(-self.piece // self.exchanging)

    @property
    def blocks(self) -> int:
        """Blocks of codes of 8 bits in a chunk."""
        return -(-self.chunk // BLOCK_ELEMENTS)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk as it is sent."""
        words = -(-self.chunk // 2) if self.compression == "bfloat16" else BLOCK_WORDS * self.blocks
        return _WORD_BYTES * words

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of the matrix that PowerSGD makes of the gradient."""
        return _matrix(self.shape)

    def state(self, path: str = "") -> dict[str, VariableLayout]:
        """What is kept between steps, by name: float32 with a row for each device, and of PowerSGD what is the same on
        all.

        Args:
            path: Of the variable.
        """
        shapes: dict[str, tuple[int, ...]] = {ERROR: (self.devices, self.piece)}
        if isinstance(self.compression, PowerSGD):
            shapes = {ERROR: (self.devices, self.elements), FACTOR: (self.matrix[1], self.compression.rank), STEPS: ()}
        elif self.dim is None:
            shapes[SUM_ERROR] = (self.devices, self.chunk)
        return {name: self._kept(f"{path}_compression_{name}", name, shape) for name, shape in shapes.items()}

    def _kept(self, path: str, name: str, shape: tuple[int, ...]) -> VariableLayout:
        axes: Axes = (self.axis, None) if name in (ERROR, SUM_ERROR) else (None,) * len(shape)
        return VariableLayout(
            spec=VariableSpec(path=path, shape=shape, dtype="float32", trainable=False),
            compute=axes,
            sharded=None,
            flat=None,
            store_sharded=False,
            update_sharded=False,
            reduce_scatter=False,
        )

    def sends(self) -> list[Sent]:
        """What a step sends of it, for each use of the layer."""
        between = self.replicas > 1
        if isinstance(self.compression, PowerSGD):
            rank = self.compression.rank
            return [
                Sent(kind="all-reduce", between_replicas=False, bytes=_WORD_BYTES * side * rank, what="factor")
                for side in self.matrix
            ]
        exact = _WORD_BYTES * self.adders * self.piece
        encoded, name = self.exchanging * self.chunk_bytes, f"gradient in {self.compression}"
        found = [Sent(kind="all-to-all", between_replicas=between, bytes=encoded, what=name)]
        if self.dim is None:
            found.append(Sent(kind="all-gather", between_replicas=between, bytes=encoded, what=f"sum, {name}"))
        if self.adders > 1:
            found.insert(0, Sent(kind="all-to-all", between_replicas=False, bytes=exact, what="gradient"))
            found.append(Sent(kind="all-gather", between_replicas=False, bytes=exact, what="gradient"))
        return found

    def first_factor(self) -> np.ndarray:
        """The factor of PowerSGD before the first step: drawn, the same on all clients."""
        assert isinstance(self.compression, PowerSGD)
        drawn = np.random.RandomState(self.elements % (1 << 32)).normal(size=(self.matrix[1], self.compression.rank))
        return drawn.astype("float32")


def chosen(layout: VariableLayout, compression: Compression, mesh_shape: Mapping[str, int]) -> VariableLayout:
    """The layout of a variable whose gradient is compressed, if it is: those of small variables are added up exactly,
    together with others.

    What devices add up of what they exchange are shards. So at stage 1 too the gradient comes in those of the update.

    Args:
        layout: Without compression, in its group if it is in one.
        compression: What is done with gradients.
        mesh_shape: Axis name to size.
    """
    axes, spec = MeshAxes.of(mesh_shape), layout.spec
    if (
        compression is None
        or axes.data_size == 1
        or not spec.trainable
        or spec.dtype not in ("float32", "bfloat16", "float16")
        or variable_layout.spec_bytes(spec) < variable_layout.LEAST_BY_REPLICAS_BYTES
        or (isinstance(compression, PowerSGD) and not _is_low_rank(compression, spec))
    ):
        return layout
    scatters = layout.reduce_scatter or (layout.update_sharded and layout.sharded is not None)
    return dataclasses.replace(layout, compression=compression, reduce_scatter=scatters)


def of(layout: VariableLayout, mesh_shape: Mapping[str, int]) -> CompressedForm | None:
    """How the gradient of a variable is compressed; None if it is not."""
    axes = MeshAxes.of(mesh_shape)
    if layout.compression is None:
        return None
    assert axes.data is not None, layout
    is_scattered = layout.reduce_scatter and layout.sharded is not None
    return CompressedForm(
        compression=layout.compression,
        shape=layout.spec.shape,
        dim=layout.gradient.index(axes.data) if is_scattered else None,
        axis=axes.data,
        replicas=axes.replicas,
        shards=axes.shards,
    )


def _is_low_rank(power: PowerSGD, spec: VariableSpec) -> bool:
    """Whether it is a kernel of which PowerSGD sends less than all."""
    if not spec.is_kernel_of_dense or len(spec.shape) < 2:
        return False
    return power.rank * sum(_matrix(spec.shape)) < math.prod(spec.shape)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns: the leading dims and the others, cut where a matrix has the shortest sides."""
    sides = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    return min(sides, key=sum)


def total_error(errors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """What all devices together have not sent of a gradient of this shape.

    Args:
        errors: By name what was kept, of any number of devices and replicas, which their shapes tell.
        shape: Of the gradient.
    """
    elements, error = math.prod(shape), errors[ERROR]
    devices, piece = error.shape
    adders = -(-elements // piece)
    total = error.reshape(devices // adders, -1).sum(0)
    if SUM_ERROR in errors:
        # Of each device of the replicas its chunk of the piece.
        chunks = errors[SUM_ERROR].reshape(devices // adders, adders, -1).swapaxes(0, 1)
        total = total + chunks.reshape(adders, -1)[:, :piece].reshape(-1)
    result: np.ndarray = total[:elements].reshape(shape)
    return result


def shared_out(total: np.ndarray, form: CompressedForm) -> dict[str, np.ndarray]:
    """What each device keeps, if all together have not sent a total: as much each."""
    line = np.pad(total.reshape(-1), (0, form.adders * form.piece - form.elements)) / form.exchanging
    rows = np.broadcast_to(line, (form.exchanging, line.size))
    if isinstance(form.compression, PowerSGD):
        rows = np.broadcast_to(total.reshape(-1) / form.devices, (form.devices, form.elements))
    found = {ERROR: rows.reshape(form.devices, -1)}
    if SUM_ERROR in form.state():
        found[SUM_ERROR] = np.zeros((form.devices, form.chunk))
    return {name: np.ascontiguousarray(value, np.float32) for name, value in found.items()}

"""CompressedForm: how the gradient of a variable is compressed, its error-feedback residuals, and its collectives.

On a mesh without replicas, all devices of the data axis exchange compressed gradients. With replicas, each replica
first reduce-scatters its local gradients without compression; then matching devices of the replicas exchange
compressed shards of the sums. PowerSGD instead all-reduces its factors over all devices of the data axis.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from tfshard.contrib.compression.options import PowerSGD
from tfshard.layouts.gradient_reduction import SentGradient
from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.variable_layout import BLOCK_ELEMENTS, BLOCK_WORDS, Axes, VariableLayout

_WORD_BYTES = 4

# Names of the state that is kept between steps. `ERROR`: for each device, the residual of the gradient that it sent.
# `SUM_ERROR`: for each device, the residual of the sum that it sent. PowerSGD also keeps the factor that begins the
# next power iteration (`FACTOR`) and the number of steps (`STEPS`).
ERROR, SUM_ERROR, FACTOR, STEPS = "error", "sum_error", "factor", "steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedForm:
    """How the gradient of a variable is compressed.

    Attributes:
        compression: `"bfloat16"`, `"int8"` or a `PowerSGD`.
        shape: The shape of the gradient.
        dim: The dim of the reduced gradient that the data axis shards; None if the result is replicated.
        axis: The data axis.
        replicas: The number of replicas.
        shards: The number of shards in a replica.
    """

    compression: str | PowerSGD
    shape: tuple[int, ...]
    dim: int | None
    axis: str
    replicas: int
    shards: int

    @property
    def devices(self) -> int:
        """The size of the data axis."""
        return self.replicas * self.shards

    @property
    def adders(self) -> int:
        """How many devices reduce gradients without compression, before the exchange: the devices of a replica."""
        return self.shards if self.replicas > 1 else 1

    @property
    def exchanging(self) -> int:
        """How many devices exchange compressed gradients."""
        return self.devices // self.adders

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def sent_elements(self) -> int:
        """Elements that a device compresses: of the gradient, or of its shard of the replica's sum."""
        return -(-self.elements // self.adders)

    @property
    def chunk(self) -> int:
        """Elements that a device receives from each other device."""
        return -(-self.sent_elements // self.exchanging)

    @property
    def blocks(self) -> int:
        """Blocks of 8-bit codes in a chunk."""
        return -(-self.chunk // BLOCK_ELEMENTS)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an encoded chunk."""
        words = -(-self.chunk // 2) if self.compression == "bfloat16" else BLOCK_WORDS * self.blocks
        return _WORD_BYTES * words

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of the matrix to which PowerSGD reshapes the gradient."""
        return matrix_of(self.shape)

    def state(self, path: str = "") -> dict[str, VariableLayout]:
        """Return the layouts of the state that is kept between steps, by name.

        Residuals are float32 with a row for each device. The state of PowerSGD is replicated, except its residual.

        Args:
            path: The path of the variable.
        """
        shapes: dict[str, tuple[int, ...]] = {ERROR: (self.devices, self.sent_elements)}
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

    def sends(self) -> list[SentGradient]:
        """Return the collectives of the gradient in a step, for each use of the layer."""
        between = self.replicas > 1
        if isinstance(self.compression, PowerSGD):
            rank = self.compression.rank
            return [
                SentGradient(kind="all-reduce", between_replicas=False, bytes=_WORD_BYTES * side * rank, what="factor")
                for side in self.matrix
            ]
        exact = _WORD_BYTES * self.adders * self.sent_elements
        encoded, name = self.exchanging * self.chunk_bytes, f"gradient in {self.compression}"
        found = [SentGradient(kind="all-to-all", between_replicas=between, bytes=encoded, what=name)]
        if self.dim is None:
            found.append(SentGradient(kind="all-gather", between_replicas=between, bytes=encoded, what=f"sum, {name}"))
        if self.adders > 1:
            found.insert(0, SentGradient(kind="all-to-all", between_replicas=False, bytes=exact, what="gradient"))
            found.append(SentGradient(kind="all-gather", between_replicas=False, bytes=exact, what="gradient"))
        return found

    def first_factor(self) -> np.ndarray:
        """Return the random first factor of PowerSGD, equal on all clients."""
        assert isinstance(self.compression, PowerSGD)
        drawn = np.random.RandomState(self.elements % (1 << 32)).normal(size=(self.matrix[1], self.compression.rank))
        return drawn.astype("float32")


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns: the shape is cut where the sum of both sides is smallest."""
    sides = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    return min(sides, key=sum)


def total_error(errors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return the sum of the residuals of all devices, for a gradient of this shape.

    Args:
        errors: The residuals by name, of any number of devices and replicas; their shapes tell the numbers.
        shape: The shape of the gradient.
    """
    elements, error = math.prod(shape), errors[ERROR]
    devices, sent_elements = error.shape
    adders = -(-elements // sent_elements)
    total = error.reshape(devices // adders, -1).sum(0)
    if SUM_ERROR in errors:
        # For each device of the replicas: its chunk of its replica's shard.
        chunks = errors[SUM_ERROR].reshape(devices // adders, adders, -1).swapaxes(0, 1)
        total = total + chunks.reshape(adders, -1)[:, :sent_elements].reshape(-1)
    result: np.ndarray = total[:elements].reshape(shape)
    return result


def shared_out(total: np.ndarray, form: CompressedForm) -> dict[str, np.ndarray]:
    """Return the residuals of all devices, given their sum: every device gets an equal share."""
    line = np.pad(total.reshape(-1), (0, form.adders * form.sent_elements - form.elements)) / form.exchanging
    rows = np.broadcast_to(line, (form.exchanging, line.size))
    if isinstance(form.compression, PowerSGD):
        rows = np.broadcast_to(total.reshape(-1) / form.devices, (form.devices, form.elements))
    found = {ERROR: rows.reshape(form.devices, -1)}
    if SUM_ERROR in form.state():
        found[SUM_ERROR] = np.zeros((form.devices, form.chunk))
    return {name: np.ascontiguousarray(value, np.float32) for name, value in found.items()}

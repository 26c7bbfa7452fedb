"""CompressedReduction: the reduction of gradients that `compression=` chooses, for plans, steps and checkpoints."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.contrib.compression import compressed_form, compressed_sums, encoding
from tfshard.contrib.compression.compressed_form import ERROR, FACTOR, SUM_ERROR, CompressedForm
from tfshard.contrib.compression.compression_gain import CompressionGain
from tfshard.contrib.compression.options import CODES, PowerSGD
from tfshard.devices import replicas
from tfshard.errors import StrategyError
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes, axis_sizes
from tfshard.layouts.gradient_reduction import GradientReduction, ReductionOptions, SentGradient
from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.storage.variables import ShardedVariable

# The rank of PowerSGD for which `profile_network` measures the encoding time.
MEASURED_RANK = 4


@dataclasses.dataclass(frozen=True)
class CompressedReduction(GradientReduction):
    """Devices send encoded gradients, and keep error-feedback residuals.

    Attributes:
        option: `"bfloat16"`, `"int8"` or a `tfshard.PowerSGD`.
    """

    option: str | PowerSGD

    @classmethod
    def from_option(cls, option: Any) -> "CompressedReduction | None":
        """Return the reduction of a user's option; None for an option of another extension."""
        return cls(option) if isinstance(option, PowerSGD) or option in CODES else None

    def check_mesh(self, axes: MeshAxes) -> None:
        if axes.has_tensor_parallelism:
            raise StrategyError(
                "compression needs a mesh of only a batch axis, with or without replicas: on other axes, each "
                "device holds only a part of a gradient. Leave compression out. Received: "
                f"compression={self.option!r}, mesh={axes.given}"
            )

    def choose(self, layout: VariableLayout, axes: MeshAxes) -> VariableLayout:
        """Return the layout of a variable, with this reduction if its gradient is compressed.

        The gradients of small variables are reduced without compression, together with other gradients. The exchange of
        compressed gradients reduce-scatters. Stage 1, too, therefore takes the gradient in the layout of the update.
        """
        spec = layout.spec
        if (
            axes.data_size == 1
            or not spec.trainable
            or spec.dtype not in ("float32", "bfloat16", "float16")
            or variable_layout.spec_bytes(spec) < variable_layout.LEAST_BY_REPLICAS_BYTES
            or (isinstance(self.option, PowerSGD) and not _is_low_rank(self.option, spec))
        ):
            return layout
        scatters = layout.reduce_scatter or (layout.update_sharded and layout.sharded is not None)
        return dataclasses.replace(layout, reduction=self, reduce_scatter=scatters)

    def form(self, layout: VariableLayout, axes: MeshAxes) -> CompressedForm:
        """Return how the gradient of a variable with this reduction is compressed."""
        assert axes.data is not None, layout
        is_scattered = layout.reduce_scatter and layout.sharded is not None
        return CompressedForm(
            compression=self.option,
            shape=layout.spec.shape,
            dim=layout.gradient.index(axes.data) if is_scattered else None,
            axis=axes.data,
            replicas=axes.replicas,
            shards=axes.shards,
        )

    # --- the state between steps

    def state(self, layout: VariableLayout, axes: MeshAxes) -> dict[str, VariableLayout]:
        return self.form(layout, axes).state(layout.spec.path)

    def first_value(self, name: str, layout: VariableLayout, axes: MeshAxes) -> np.ndarray | None:
        """Return the first factor of PowerSGD; None for residuals, which start at zero."""
        return self.form(layout, axes).first_factor() if name == FACTOR else None

    def restored(
        self, layout: VariableLayout, axes: MeshAxes, stored: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the state after a restore.

        With an equal number of devices and replicas, each device gets its residual back. Otherwise only the sum of the
        residuals matters, and the devices share the sum evenly. State that was not stored gets its first value.
        """
        form = self.form(layout, axes)
        shapes = {name: kept.spec.shape for name, kept in form.state().items()}
        errors = {name: stored[name] for name in (ERROR, SUM_ERROR) if name in stored}
        new = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        new |= {FACTOR: form.first_factor()} if FACTOR in shapes else {}
        fits = {name for name, value in stored.items() if name in shapes and value.shape == shapes[name]}
        new |= {name: stored[name] for name in fits - errors.keys()}
        if errors.keys() <= fits and errors.keys() == shapes.keys() & {ERROR, SUM_ERROR}:
            new |= errors
        elif errors:
            new |= compressed_form.shared_out(compressed_form.total_error(errors, form.shape), form)
        return new

    # --- plans and advice

    def sends(self, layout: VariableLayout, axes: MeshAxes) -> list[SentGradient]:
        return self.form(layout, axes).sends()

    def encoded_bytes(self, layout: VariableLayout, axes: MeshAxes) -> int:
        """Return the float32 bytes that a device encodes: with replicas and codes, of its shard, otherwise of the full
        gradient."""
        form = self.form(layout, axes)
        return 4 * (form.elements if isinstance(self.option, PowerSGD) else form.sent_elements)

    @property
    def encoding(self) -> tuple[str, float]:
        """The name of the measured encoding time, and a factor: the time of PowerSGD grows with the rank above 4."""
        if isinstance(self.option, PowerSGD):
            return "powersgd", max(1.0, self.option.rank / MEASURED_RANK)
        return self.option, 1.0

    def encoder(self, devices: int) -> Callable[[], tf.Tensor]:
        return encoding.encoder(self.option, devices)

    def gain_text(self, *, link_seconds: float, encode_seconds: float) -> str:
        return str(CompressionGain(link_seconds=link_seconds, encode_seconds=encode_seconds))

    # --- steps

    def meet(self, mesh: dtensor.Mesh) -> None:
        replicas.meet_to_exchange(mesh)

    def reduce_local(self, local: tf.Tensor, variable: ShardedVariable) -> tf.Tensor:
        return compressed_sums.reduce_local(local, self.form(variable.layout, axis_sizes(variable.mesh)), variable)


OPTIONS = ReductionOptions(
    choices="'bfloat16', 'int8' or a tfshard.PowerSGD",
    make=CompressedReduction.from_option,
    automatic=CODES,
    measured=tuple(CompressedReduction(option) for option in (*CODES, PowerSGD(rank=MEASURED_RANK))),
)


def _is_low_rank(power: PowerSGD, spec: VariableSpec) -> bool:
    """Return True for a kernel that PowerSGD makes smaller."""
    if not spec.is_kernel_of_dense or len(spec.shape) < 2:
        return False
    return power.rank * sum(compressed_form.matrix_of(spec.shape)) < math.prod(spec.shape)

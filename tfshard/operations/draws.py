"""Random numbers of a step: each device draws the numbers that one device would draw for its local rows.

TensorFlow's generator is a counter (Philox; Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"). Its
kernels make a fixed number of elements at each count, in any thread (`FillPhiloxRandom` in TensorFlow 2.21's
core/kernels/random_op_cpu.h and random_op_gpu.h). A device that begins at another count therefore draws a slice of the
draw of one device. DTensor's expansion gives each shard another seed instead, and the numbers differ from one device.

- Each device draws its local rows if the draw may have the rows of the batch (`sharded_dim`), or its chunks of them.
- A microbatch draws its rows of the draw of the full batch. All microbatches of a step have the same seeds.
- Every device makes other draws in full, and so the draws of generators that take a seed only (`OF_SEEDS`). DTensor
  keeps the seed of a draw that nothing shards.
- `tf.random.normal` and others keep their state in the kernel. They are drawn as `keras.random` draws.
"""

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.sequence_chunks import SequenceChunks
from tfshard.operations import rows, unsized
from tfshard.operations.registry import rewrite_rule
from tfshard.storage import steps
from tfshard.storage.microbatch import Microbatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generator:
    """The way in which an operation uses the counter.

    Attributes:
        type: The operation that takes a key and a counter.
        samples: The random numbers that it reserves for each element; None if it makes a fixed number of elements at
            each count.
    """

    type: str
    samples: int | None = None

    def group(self, dtype: tf.DType) -> int:
        """Return how many elements share a count."""
        if self.type == _GAMMA:
            return 1
        return _WORDS // 2 if dtype.size == 8 else _WORDS

    def counts(self, dtype: tf.DType) -> int:
        """Return how many counts a group of elements takes."""
        if self.samples is None:
            return 1
        # A gamma skips as many counts as it reserves numbers.
        return self.samples if self.type == _GAMMA else self.samples * self.group(dtype) // _WORDS


# Words of 32 bits at each count.
_WORDS = 4
_GAMMA = "StatelessRandomGammaV3"

GENERATORS: dict[str, Generator] = {
    "StatelessRandomUniformV2": Generator(type="StatelessRandomUniformV2"),
    "StatelessRandomNormalV2": Generator(type="StatelessRandomNormalV2"),
    "StatelessRandomUniformFullIntV2": Generator(type="StatelessRandomUniformFullIntV2"),
    "StatelessRandomUniformIntV2": Generator(type="StatelessRandomUniformIntV2"),
    "StatelessTruncatedNormalV2": Generator(type="StatelessTruncatedNormalV2", samples=256),
    _GAMMA: Generator(type=_GAMMA, samples=256),
}
# Operations with a seed in place of key, counter and algorithm draw the same numbers.
OLD_GENERATORS: dict[str, Generator] = {
    "StatelessRandomUniform": GENERATORS["StatelessRandomUniformV2"],
    "StatelessRandomNormal": GENERATORS["StatelessRandomNormalV2"],
    "StatelessRandomUniformFullInt": GENERATORS["StatelessRandomUniformFullIntV2"],
    "StatelessRandomUniformInt": GENERATORS["StatelessRandomUniformIntV2"],
    "StatelessTruncatedNormal": GENERATORS["StatelessTruncatedNormalV2"],
    "StatelessRandomGammaV2": GENERATORS[_GAMMA],
}


# Operations that take a seed only, and the number of the operand: no device can begin at another count.
OF_SEEDS: dict[str, int] = {
    "StatelessMultinomial": 2,
    "StatelessParameterizedTruncatedNormal": 1,
    "StatelessRandomBinomial": 1,
    "StatelessRandomPoisson": 1,
}
# TensorFlow's operations that keep their state in the kernel.
STATEFUL: dict[str, str] = {
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomUniformInt": "StatelessRandomUniformIntV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
    "RandomGamma": _GAMMA,
}
TYPES = (*GENERATORS, *OLD_GENERATORS, *OF_SEEDS, *STATEFUL)


@rewrite_rule(
    *TYPES, graph=True, eager=True, gradient="registered", sizes="any",
    fault="draws different numbers than one device, and different numbers on each replica of a mesh of several "
          "axes; refuses `tf.random.normal` and others whose state is in the kernel",
    cases=("random draw", "random draw in an eager step"),
)  # fmt: skip
def draw(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor | None:
    """Draw on each device its local rows of the numbers that one device draws."""
    if call.is_eager:
        return _eager_draw(call, mesh)
    assert call.outputs is not None
    (random,) = call.outputs
    if not random.shape.is_fully_defined():
        return _unsized_draw(call, mesh)
    if call.type in OF_SEEDS:
        return _of_seed(call, mesh)
    inputs = list(call.inputs)
    if call.type in STATEFUL:
        inputs[1:1] = _key_and_counter(_seed_of(call))
    elif call.type in OLD_GENERATORS:
        inputs[1:2] = _key_and_counter(inputs[1])
    generator = GENERATORS.get(call.type) or OLD_GENERATORS.get(call.type) or GENERATORS[STATEFUL[call.type]]
    _, key, counter, algorithm, *parameters = inputs
    drawn = _Draw(
        generator=generator, shape=tuple(random.shape), dtype=random.dtype, key=key, counter=counter,
        algorithm=algorithm, parameters=parameters, mesh=mesh,
    )  # fmt: skip
    return drawn.made()


def _unsized_draw(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor | None:
    """Draw in full on every device if the shape depends on values."""
    assert call.outputs is not None
    (random,) = call.outputs
    is_of_generator = call.type in GENERATORS or call.type in OLD_GENERATORS
    if _microbatch() is not None:
        return None  # All microbatches would draw the same numbers: DTensor refuses it.
    if not is_of_generator or not random.shape.rank or not unsized.depends_on_values(*call.inputs):
        return None  # DTensor refuses it.
    shape, seed, *others = call.inputs

    def all_of_them(seed: tf.Tensor) -> tf.Tensor:
        return _private.same_operation(call, [shape, seed, *others])[0]

    return local_shards.run_locally(all_of_them, seed, (None,) * seed.shape.rank, (None,) * random.shape.rank, mesh)


def batch_dim(shape: tuple[int, ...]) -> int | None:
    """Return the batch dim of a draw, or None.

    A draw with as many rows as the batch has a batch dim. A draw with more rows has one, too, such as a draw for each
    token or for collocation points. Exceptions are draws that probably meet the batch along other dims: a vector, a
    draw in the shape of a variable, or a draw that begins with another dim of the batch. The numbers are right either
    way. Devices share the computation that follows a batch dim.
    """
    step = steps.current()
    if step is None or not math.prod(shape):
        return None
    if shape[:1] and shape[0] in step.batch.rows:
        return 0
    if steps.open_update() is not None or shape in step.reads.shapes or shape in _shapes_of_layers():
        return None
    dim = next((dim for dim, size in enumerate(shape) if size in step.batch.rows), None)
    if dim is not None:
        return dim
    is_more = len(shape) > 1 and shape[0] not in step.batch.other_dims and shape[0] >= max(step.batch.rows, default=0)
    return 0 if is_more else None


def _shapes_of_layers() -> set[tuple[int, ...]]:
    """Return the shapes of the variables of the layers that are being called."""
    layers = [caller for caller in _private.scope_callers() if isinstance(caller, keras.Layer)]
    return {tuple(variable.shape) for layer in layers for variable in _private.layer_variables(layer)}


def sharded_dim(shape: tuple[int, ...], mesh: dtensor.Mesh) -> int | None:
    """Return the dim of a draw that the batch axis shards; None if the draw is replicated."""
    dim, size = batch_dim(shape), axis_sizes(mesh).data_size
    return dim if dim is not None and size > 1 and shape[dim] % size == 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draw:
    """A draw of a traced step.

    Attributes:
        generator: Its generator.
        shape: The shape, of all devices.
        dtype: The dtype.
        key: `(1,)`, uint64.
        counter: `(2,)`, uint64.
        algorithm: A scalar.
        parameters: The bounds of integers, or the shapes of gammas.
        mesh: The mesh.
    """

    generator: Generator
    shape: tuple[int, ...]
    dtype: tf.DType
    key: tf.Tensor
    counter: tf.Tensor
    algorithm: tf.Tensor
    parameters: list[tf.Tensor]
    mesh: dtensor.Mesh

    def made(self) -> tf.Tensor:
        """Return the tensor, sharded over the batch axis if it has a batch dim."""
        microbatch = _microbatch()
        rows_dim, dim = batch_dim(self.shape), sharded_dim(self.shape, self.mesh)
        if not self._counts_other_parameters():
            is_part = microbatch is not None and rows_dim == 0 and self.shape[0] % microbatch.rows == 0
            if dim == 0 or is_part:
                devices = 1 if dim is None else axis_sizes(self.mesh).data_size
                if self._has_chunks():
                    return self._by_chunks(devices, microbatch if is_part else None)
                return self._by_rows(devices, microbatch if is_part else None)
            if microbatch is None and rows_dim == 0 and self._has_chunks():
                return self._by_chunks(1, None)
        counter = self.counter
        if microbatch is not None and rows_dim is not None:
            counter = _later(counter, tf.cast(microbatch.number, tf.int64) * _FAR)
        drawn = self._drawn(
            list(self.shape), counter, [transfer.replicate(each, self.mesh) for each in self.parameters]
        )
        return _shared_out(transfer.replicate(drawn, self.mesh), self.mesh)

    def _counts_other_parameters(self) -> bool:
        """Return whether the generator counts by elements of a parameter, and not by rows."""
        parameter = self.parameters[0] if self.generator.type == _GAMMA else None
        return parameter is not None and bool(parameter.shape.rank) and parameter.shape != self.shape

    def _by_rows(self, devices: int, microbatch: Microbatch | None) -> tf.Tensor:
        local_shape = (self.shape[0] // devices, *self.shape[1:])
        count, group = math.prod(local_shape), self.generator.group(self.dtype)
        # By device and microbatch.
        blocks = np.arange(devices).reshape(devices, 1) if microbatch is None else microbatch.blocks(devices)
        begins = blocks * count
        counts, more = begins // group * self.generator.counts(self.dtype), begins % group
        with local_shards.scope():
            parameters = self.parameters
            if self.generator.type == _GAMMA and parameters[0].shape.rank and devices > 1:
                parameters = [rows.to_local(parameters[0], self.mesh)]
            counter = _later(self.counter, self._here(counts, devices, microbatch))
            drawn = self._drawn([count + int(more.max())] if more.any() else list(local_shape), counter, parameters)
            if more.any():
                begin = self._here(more, devices, microbatch)
                drawn = tf.reshape(tf.slice(drawn, begin, tf.constant([count], tf.int64)), local_shape)
            return rows.from_local(drawn, self.mesh) if devices > 1 else transfer.replicate(drawn, self.mesh)

    def _has_chunks(self) -> bool:
        """Return whether the rows are chunks of sequences."""
        step = steps.current()
        if step is None or axis_sizes(self.mesh).contexts == 1 or self.parameters and self.parameters[0].shape.rank:
            return False
        return len(self.shape) > 1 and self.shape[1] in step.batch.other_dims

    def _by_chunks(self, devices: int, microbatch: Microbatch | None) -> tf.Tensor:
        """Draw each local row alone, because local rows do not follow each other in the draw of one device.

        A single device draws full sequences. A row is a chunk of one of them.
        """
        chunks = SequenceChunks.of(axis_sizes(self.mesh))
        parts = 1 if microbatch is None else microbatch.count
        local = self.shape[0] // devices
        total = devices * parts * local
        samples = chunks.repeated(np.arange(total // chunks.contexts))
        # For each row of the batch, the number of its chunk in the draw of one device.
        numbers = samples * chunks.contexts + chunks.chunks_of_rows(total)
        blocks = np.arange(devices).reshape(devices, 1) if microbatch is None else microbatch.blocks(devices)
        count, group = math.prod(self.shape[1:]), self.generator.group(self.dtype)
        begins = numbers[blocks[..., np.newaxis] * local + np.arange(local)] * count
        counts, more = begins // group * self.generator.counts(self.dtype), begins % group
        drawn = []
        with local_shards.scope():
            for row in range(local):
                counter = _later(self.counter, self._here(counts[..., row], devices, microbatch))
                line = self._drawn([count + int(more.max())], counter, self.parameters)
                if more.any():
                    begin = self._here(more[..., row], devices, microbatch)
                    line = tf.slice(line, begin, tf.constant([count], tf.int64))
                drawn.append(tf.reshape(line, self.shape[1:]))
            made = tf.stack(drawn)
            return rows.from_local(made, self.mesh) if devices > 1 else transfer.replicate(made, self.mesh)

    def _here(self, values: np.ndarray, devices: int, microbatch: Microbatch | None) -> tf.Tensor:
        """Return the number of this device and microbatch, `(1,)`, from a table of devices by microbatches."""
        table = tf.constant(values, tf.int64)
        line = tf.reshape(rows.to_local(table, self.mesh) if devices > 1 else table, [values.shape[1]])
        return line if microbatch is None else tf.reshape(tf.gather(line, microbatch.number), [1])

    def _drawn(self, shape: list[int], counter: tf.Tensor, parameters: list[tf.Tensor]) -> tf.Tensor:
        given: dict[str, Any] = {"shape": shape, "key": self.key, "counter": counter, "alg": self.algorithm}
        if self.generator.type == _GAMMA:
            given["alpha"] = parameters[0]
        elif parameters:
            given["minval"], given["maxval"] = parameters
        else:
            given["dtype"] = self.dtype
        result: tf.Tensor = getattr(tf.raw_ops, self.generator.type)(**given)
        return result


# The distance between the counters of microbatches that cannot draw their rows. No microbatch draws as many numbers.
_FAR = 1 << 40


def _microbatch() -> Microbatch | None:
    step = steps.current()
    return None if step is None else step.batch.microbatch


def _later(counter: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Return a counter that is advanced by some counts. Its first number counts, from 0 for a seed."""
    moved = tf.bitcast(counter, tf.int64) + tf.reshape(counts, [1]) * tf.constant([1, 0], tf.int64)
    return tf.bitcast(moved, tf.uint64)


def _key_and_counter(seed: tf.Tensor) -> list[tf.Tensor]:
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    return [key, counter, tf.constant(tf.random.Algorithm.AUTO_SELECT.value)]


def _seed_of(call: _private.Call) -> tf.Tensor:
    """Return the sum of the state of Keras's generator of the process and the seeds of an operation."""
    state = tf.cast(_private.global_seed_generator(create=True).next(), tf.int32)
    return state + tf.constant([call.get_attr("seed") % _SEEDS, call.get_attr("seed2") % _SEEDS], tf.int32)


_SEEDS = 1 << 31


def _of_seed(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor:
    """Draw in full on every device, with another seed for each microbatch."""
    microbatch, number = _microbatch(), OF_SEEDS[call.type]
    inputs = [transfer.replicate(each, mesh) if each.dtype.is_floating else each for each in call.inputs]
    if microbatch is not None:
        seed = inputs[number]
        inputs[number] = seed + tf.cast(microbatch.number, seed.dtype) * tf.constant([0, _PRIME], seed.dtype)
    (drawn,) = _private.same_operation(call, inputs)
    return _shared_out(transfer.replicate(drawn, mesh), mesh)


def _shared_out(drawn: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a draw that all devices made in full, sharded over the batch axis along its batch dim."""
    dim = sharded_dim(tuple(drawn.shape), mesh)
    axes = tuple(axis_sizes(mesh).data if each == dim else None for each in range(drawn.shape.rank))
    return transfer.relayout(drawn, axes, mesh)


_PRIME = 1_000_003


def _eager_draw(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor | None:
    """Draw in full on every device, and keep the local rows."""
    if call.type in STATEFUL:
        return None
    (drawn,) = _private.same_operation(call, call.inputs)
    return _shared_out(drawn, mesh) if transfer.is_dtensor(drawn) else drawn

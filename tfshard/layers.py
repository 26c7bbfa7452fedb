"""Keras layers of our own: SketchedDense. They work without a strategy too."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfshard.errors import ShardingError, warn


@keras.saving.register_keras_serializable(package="tfshard")
class SketchedDense(keras.layers.Layer):  # type: ignore[misc]
    """A linear layer through random sketches, as `SKLinear` of the Panther library.

    For inputs `x` of `n` features, `m = units` outputs, `l = num_sketches` and `k = sketch_size`:

        y = activation((1 / (2 l)) sum_i (x @ S1_i @ U1_i + x @ U2_i @ S2_i) + b)

    `S1_i` (n, k), `S2_i` (k, m) and `b` (m,) are trained. The sketches `U1_i` (k, m) and `U2_i` (n, k) are random signs
    divided by `sqrt(k)`, and stay as they are. Training begins at `S1_i = W @ U1_i.T` and `S2_i = U2_i.T @ W` with one
    `W` (n, m) from `kernel_initializer`. As `U1_i.T @ U1_i` and `U2_i @ U2_i.T` are the identity on average over the
    signs, `y` is then `x @ W + b` on average. If the entries of `W` are independent, of mean 0 and of one variance, the
    variance of `y - b` is `1 + (n + m - 2) / (4 l k)` times that of `x @ W`.

    Sources: Seddik et al. 2026, "Panther: Faster and Cheaper Computations with Randomized Numerical Linear Algebra",
    arXiv:2601.15473, with its `panther/nn/linear.py` and `pawX/linear.cpp`; the method is the SK-FC layer of
    Kasiviswanathan, Narodytska and Jin 2018, "Network Approximation using Tensor Sketching", IJCAI. The variance is
    worked out here.

    Cost, where a `Dense` layer has `n m` weights and as many multiplications for each row of `x`: `l k (n + m)` trained
    weights (with gradients and slots), as many that are not trained, and `2 l k (n + m)` multiplications. A layer with
    `2 l k (n + m) > n m` costs more than the `Dense` layer, and warns.

    The sketches' weights lie side by side, so that a call is four matrix products: `input_kernel` and `input_sketch`
    are (n, l k), `output_kernel` and `output_sketch` are (l k, m). The sketches are weights that are not trained. They
    are saved with the model, and the same seed gives the same ones on every device and on one device.

    Tensor parallelism: `LayoutMap.column` shards what has the output dim (`output_kernel`, `output_sketch`, `bias`),
    `LayoutMap.row` what has the input dim (`input_kernel`, `input_sketch`). The devices then add up `2 l k` numbers for
    each row of `x`, backward for column and forward for row, instead of the `n` or `m` of a `Dense` layer.

    Args:
        units: Size of the output's last dim, a positive integer.
        sketch_size: Size of a sketch (`k`), a positive integer.
        num_sketches: How many pairs of sketches are averaged (`l`), a positive integer.
        activation: Activation function; by default none.
        use_bias: Whether there is a bias.
        kernel_initializer: Initializer of `W`. It is called for both kernels, and has to give the same `W` again, as
            Keras's initializers do. A function that gives the kernel of a trained `Dense` layer makes this layer an
            approximation of it.
        bias_initializer: Initializer of the bias.
        kernel_regularizer: Regularizer of `input_kernel` and `output_kernel`.
        bias_regularizer: Regularizer of the bias.
        activity_regularizer: Regularizer of the output.
        kernel_constraint: Constraint of `input_kernel` and `output_kernel`.
        bias_constraint: Constraint of the bias.
        seed: Integer seed of the sketches. By default one that `keras.utils.set_random_seed` decides.
        **kwargs: `name`, `dtype` and others of `keras.layers.Layer`.

    Input shape: `(batch, ..., n)`. Output shape: `(batch, ..., units)`.

    Raises:
        ShardingError: `units`, `sketch_size` or `num_sketches` is not a positive integer, or `n` is not known.

    Example:

    >>> import keras, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> sketched = tfshard.layers.SketchedDense(64, sketch_size=8, name="sketched")
    >>> model = tfshard.Sequential([keras.Input((64,)), sketched, keras.layers.Dense(1, name="head")])
    >>> layout_map = tfshard.LayoutMap()
    >>> layout_map.column(".*/sketched")
    >>> layout_map.row(".*head")
    >>> model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(model=4), layout_map))
    >>> sketched.output_kernel.value.layout.compute
    (None, 'model')
    """

    def __init__(
        self,
        units: int,
        sketch_size: int,
        num_sketches: int = 1,
        *,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(activity_regularizer=activity_regularizer, **kwargs)
        self.units = _positive("units", units)
        self.sketch_size = _positive("sketch_size", sketch_size)
        self.num_sketches = _positive("num_sketches", num_sketches)
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.seed = seed
        # Draws the same numbers each time, and decides on a seed when there is none.
        self._uniform = keras.initializers.RandomUniform(-1.0, 1.0, seed=seed)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.supports_masking = True

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Makes the weights for inputs of shape `(..., features)`."""
        features = input_shape[-1]
        if features is None:
            raise ShardingError(
                f"The last dim of the inputs of layer '{self.name}' must be known. Give it in keras.Input. "
                f"Received: input_shape={tuple(input_shape)}"
            )
        rows = self.num_sketches * self.sketch_size
        if 2 * rows * (features + self.units) > features * self.units:
            best = features * self.units // (2 * (features + self.units))
            warn(
                f"Layer '{self.name}' costs more than a Dense layer: it has 2 * num_sketches * sketch_size * (inputs + "
                f"units) = {2 * rows * (features + self.units):,} weights, a Dense layer has inputs * units = "
                f"{features * self.units:,}. num_sketches * sketch_size must be at most {best} for it to save any. "
                f"Received: num_sketches={self.num_sketches}, sketch_size={self.sketch_size}, units={self.units}, "
                f"inputs={features}"
            )
        kernel = {"regularizer": self.kernel_regularizer, "constraint": self.kernel_constraint}
        for name, shape, options in (
            ("input_kernel", (features, rows), kernel),
            ("input_sketch", (features, rows), {"trainable": False}),
            ("output_kernel", (rows, self.units), kernel),
            ("output_sketch", (rows, self.units), {"trainable": False}),
        ):
            initial = functools.partial(self._initial, name, features)
            setattr(self, name, self.add_weight(name=name, shape=shape, initializer=initial, **options))
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})

    def _initial(self, name: str, features: int, shape: Sequence[int], dtype: str) -> keras.KerasTensor:
        """The initial value of one of the four matrices. Each draws the sketches anew, so that none reads another."""
        del shape
        precise = keras.backend.result_type(dtype, "float32")
        # Drawn in float32 whatever the dtype, so that the signs are those of the seed.
        uniform = self._uniform((self.num_sketches * self.sketch_size, features + self.units), dtype="float32")
        signs = ops.where(uniform < 0, ops.cast(-1, precise), ops.cast(1, precise)) / math.sqrt(self.sketch_size)
        input_sketch, output_sketch = ops.transpose(signs[:, :features]), signs[:, features:]
        if name.endswith("sketch"):
            return ops.cast(input_sketch if name == "input_sketch" else output_sketch, dtype)
        kernel = ops.cast(self.kernel_initializer((features, self.units), dtype=precise), precise)
        if name == "input_kernel":
            return ops.cast(ops.matmul(kernel, ops.transpose(output_sketch)), dtype)
        return ops.cast(ops.matmul(ops.transpose(input_sketch), kernel), dtype)

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """`(..., features)` to `(..., units)`."""
        first = ops.matmul(ops.matmul(inputs, self.input_kernel), self.output_sketch)
        second = ops.matmul(ops.matmul(inputs, self.input_sketch), self.output_kernel)
        outputs = (first + second) * (0.5 / self.num_sketches)
        if self.bias is not None:
            outputs = outputs + self.bias
        return self.activation(outputs)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """The shape of the inputs with `units` in place of the last dim."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "units": self.units,
            "sketch_size": self.sketch_size,
            "num_sketches": self.num_sketches,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": keras.regularizers.serialize(self.activity_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
            "seed": self.seed,
        }


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ShardingError(f"{name} must be a positive integer. Received: {name}={value!r}")
    return value

"""Additional Keras layers: SketchedDense. They also work without a strategy."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfshard.errors import ShardingError, warn
from tfshard.layouts import option_checks


@keras.saving.register_keras_serializable(package="tfshard")
class SketchedDense(keras.layers.Layer):  # type: ignore[misc]
    """A linear layer through random sketches, like `SKLinear` of the Panther library.

    For inputs `x` of `n` features, `m = units` outputs, `l = num_sketches` and `k = sketch_size`:

        y = activation((1 / (2 l)) sum_i (x @ S1_i @ U1_i + x @ U2_i @ S2_i) + b)

    The weights `S1_i` (n, k), `S2_i` (k, m) and `b` (m,) are trained. The sketches `U1_i` (k, m) and `U2_i` (n, k) are
    random signs divided by `sqrt(k)`, and are not trained. Training begins at `S1_i = W @ U1_i.T` and `S2_i = U2_i.T @
    W` with one `W` (n, m) from `kernel_initializer`. On average over the signs, `U1_i.T @ U1_i` and `U2_i @ U2_i.T` are
    the identity, and `y` is `x @ W + b`. Let the entries of `W` be independent, of mean 0 and of equal variance. Then
    the variance of `y - b` is `1 + (n + m - 2) / (4 l k)` times the variance of `x @ W`.

    Sources: Seddik et al. 2026, "Panther: Faster and Cheaper Computations with Randomized Numerical Linear Algebra",
    arXiv:2601.15473, with its `panther/nn/linear.py` and `pawX/linear.cpp`. The method is the SK-FC layer of
    Kasiviswanathan, Narodytska and Jin 2018, "Network Approximation using Tensor Sketching", IJCAI. The formula for the
    variance was derived here.

    Cost: the layer has `l k (n + m)` trained weights (with gradients and slots) and as many untrained weights. It takes
    `2 l k (n + m)` multiplications for each row of `x`. A `Dense` layer has `n m` weights and as many multiplications.
    A layer with `2 l k (n + m) > n m` costs more than the `Dense` layer, and warns.

    The weights of all sketches are concatenated, so a call is four matrix products: `input_kernel` and `input_sketch`
    are (n, l k), `output_kernel` and `output_sketch` are (l k, m). The sketches are untrained weights. They are saved
    with the model, and equal seeds give equal sketches on every device and on one device.

    Tensor parallelism: `LayoutMap.column` shards the weights with the output dim (`output_kernel`, `output_sketch`,
    `bias`), `LayoutMap.row` the weights with the input dim (`input_kernel`, `input_sketch`). The devices then
    all-reduce `2 l k` numbers for each row of `x`, backward for column and forward for row. A `Dense` layer all-reduces
    `n` or `m` numbers.

    Args:
        units: Size of the output's last dim, a positive integer.
        sketch_size: Size of a sketch (`k`), a positive integer.
        num_sketches: The number of pairs of sketches that are averaged (`l`), a positive integer.
        activation: Activation function; by default none.
        use_bias: True to add a bias.
        kernel_initializer: Initializer of `W`. The layer calls it for both kernels, and it must return the same `W`
            each time, as Keras's initializers do. With a function that returns the kernel of a trained `Dense` layer,
            this layer approximates the `Dense` layer.
        bias_initializer: Initializer of the bias.
        kernel_regularizer: Regularizer of `input_kernel` and `output_kernel`.
        bias_regularizer: Regularizer of the bias.
        activity_regularizer: Regularizer of the output.
        kernel_constraint: Constraint of `input_kernel` and `output_kernel`.
        bias_constraint: Constraint of the bias.
        seed: Integer seed of the sketches. By default `keras.utils.set_random_seed` decides the seed.
        **kwargs: `name`, `dtype` and other arguments of `keras.layers.Layer`.

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
        self.units = option_checks.positive_integer("units", units, ShardingError)
        self.sketch_size = option_checks.positive_integer("sketch_size", sketch_size, ShardingError)
        self.num_sketches = option_checks.positive_integer("num_sketches", num_sketches, ShardingError)
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.seed = seed
        # Draws the same numbers at each call, and picks a seed if none is given.
        self._uniform = keras.initializers.RandomUniform(-1.0, 1.0, seed=seed)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.supports_masking = True

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make the weights for inputs of shape `(..., features)`."""
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
                f"Layer '{self.name}' costs more than a Dense layer: it has 2 * num_sketches * sketch_size * (inputs "
                f"+ units) = {2 * rows * (features + self.units):,} weights, a Dense layer has inputs * units = "
                f"{features * self.units:,}. num_sketches * sketch_size must be at most {best} to save weights. "
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
        """Return the initial value of a matrix. Each call draws the sketches again, to read no other weight."""
        del shape
        precise = keras.backend.result_type(dtype, "float32")
        # Drawn in float32 for any dtype, because the seed defines the signs in float32.
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
        """Map `(..., features)` to `(..., units)`."""
        first = ops.matmul(ops.matmul(inputs, self.input_kernel), self.output_sketch)
        second = ops.matmul(ops.matmul(inputs, self.input_sketch), self.output_kernel)
        outputs = (first + second) * (0.5 / self.num_sketches)
        if self.bias is not None:
            outputs = outputs + self.bias
        return self.activation(outputs)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the shape of the inputs with `units` as the last dim."""
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

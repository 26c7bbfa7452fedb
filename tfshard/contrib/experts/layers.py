"""MixtureOfExperts: a feed-forward layer that sends each token to a few of its experts."""

import copy
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfshard.contrib.experts import parallel_experts
from tfshard.errors import ShardingError
from tfshard.layouts import option_checks


@keras.saving.register_keras_serializable(package="tfshard")
class MixtureOfExperts(keras.layers.Layer):  # type: ignore[misc]
    """A feed-forward layer of many experts. A router sends each token to `top_k` of them.

    For a token `x`:

        p = softmax(x @ router_kernel), in float32
        y = sum over the top_k experts e of w_e * down_e(activation(up_e(x)))

    The weight w_e is p_e, divided by the sum of the chosen p_e with `normalize_weights=True`. With `gated=True` an
    expert is down_e(activation(gate_e(x)) * up_e(x)), as in Mixtral. An expert computes its own tokens only.

    A capacity bounds the work of an expert: it takes at most ceil(capacity_factor * tokens * top_k / num_experts)
    tokens of the batch, first choices of all tokens before second choices (GShard, Lepikhin et al. 2020). The expert
    adds nothing to the outputs of other tokens. Without a capacity no token is dropped.

    In training, the layer adds two losses over all tokens of the batch. The load-balancing loss is
    load_balancing * num_experts * sum_e(f_e * P_e) (Switch Transformer, Fedus et al. 2021): f_e is the share of the
    choices that fell on expert e, and P_e is the mean of p_e. The z-loss is router_z times the mean of the square of
    logsumexp(logits) (ST-MoE, Zoph et al. 2022).

    Under a `tfshard.ShardedStrategy`, each device routes its own tokens. With `experts=True` the batch axis shards the
    experts, and tokens go to the devices of their experts by an all-to-all (docs/experts.md). Results match plain Keras
    on one device.

    Args:
        num_experts: The number of experts, a positive integer.
        hidden_dim: The width of an expert's hidden layer, a positive integer.
        top_k: The number of experts of a token, from 1 to `num_experts`.
        activation: The activation function of the hidden layer.
        gated: True to multiply the activation of one projection with another projection.
        use_bias: True to add biases to the projections of experts.
        capacity_factor: A positive number. With 1, experts take all tokens if the router spreads them evenly. None
            drops no token.
        normalize_weights: True to make the weights of a token's experts sum to 1.
        load_balancing: The weight of the load-balancing loss; 0 adds none.
        router_z: The weight of the z-loss; 0 adds none.
        kernel_initializer: Initializer of the kernel `(in, out)` of one expert. Each expert gets different values.
        bias_initializer: Initializer of the biases.
        router_initializer: Initializer of the router's kernel.
        **kwargs: `name`, `dtype` and other arguments of `keras.layers.Layer`.

    Input shape: `(batch, ..., features)`. Output shape: the same. With a mask `(batch, ...)`, tokens where the mask is
    False go to no expert, give zeros, and do not count in the losses.

    The variables are `router_kernel`, always float32, and `expert_weights`: kernels `(experts, in, out)` and biases
    `(experts, out)` of the projections gate (with `gated=True`), up and down.

    Raises:
        ShardingError: An argument is outside of its range, or the number of features is not known.

    Example:

    >>> import keras, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> experts = tfshard.layers.MixtureOfExperts(8, 64, top_k=2, name="experts")
    >>> model = tfshard.Sequential([keras.Input((16, 32)), experts, keras.layers.Dense(1)])
    >>> model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), experts=True))
    >>> experts.expert_up_kernel.value.layout.storage
    ('batch', None, None)
    """

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        *,
        top_k: int = 2,
        activation: Any = "silu",
        gated: bool = False,
        use_bias: bool = False,
        capacity_factor: float | None = None,
        normalize_weights: bool = True,
        load_balancing: float = 0.01,
        router_z: float = 0.0,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        router_initializer: Any = "glorot_uniform",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.num_experts = option_checks.positive_integer("num_experts", num_experts, ShardingError)
        self.hidden_dim = option_checks.positive_integer("hidden_dim", hidden_dim, ShardingError)
        self.top_k = option_checks.positive_integer("top_k", top_k, ShardingError)
        if top_k > num_experts:
            raise ShardingError(
                f"top_k must be at most num_experts. Received: top_k={top_k}, num_experts={num_experts}"
            )
        self.activation = keras.activations.get(activation)
        self.gated, self.use_bias = bool(gated), bool(use_bias)
        if capacity_factor is not None and not _is_number(capacity_factor, least=1e-9):
            raise ShardingError(
                "capacity_factor must be a positive number, or None to drop no token. "
                f"Received: capacity_factor={capacity_factor!r}"
            )
        self.capacity_factor = None if capacity_factor is None else float(capacity_factor)
        self.normalize_weights = bool(normalize_weights)
        for name, value in (("load_balancing", load_balancing), ("router_z", router_z)):
            if not _is_number(value, least=0.0):
                raise ShardingError(f"{name} must be a number of at least 0. Received: {name}={value!r}")
        self.load_balancing, self.router_z = float(load_balancing), float(router_z)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.router_initializer = keras.initializers.get(router_initializer)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.supports_masking = True
        # XLA needs static sizes, but only the running step knows how many tokens choose an expert.
        self.supports_jit = False

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make the weights for inputs of shape `(..., features)`."""
        features = input_shape[-1]
        if features is None:
            raise ShardingError(
                f"The last dim of the inputs of layer '{self.name}' must be known. Give it in keras.Input. "
                f"Received: input_shape={tuple(input_shape)}"
            )
        self.router_kernel = self.add_weight(
            name="router_kernel",
            shape=(features, self.num_experts),
            initializer=self.router_initializer,
            dtype="float32",
            autocast=False,
        )
        for number, name in enumerate(self._projections()):
            into, out = (self.hidden_dim, features) if name == "down" else (features, self.hidden_dim)
            kernel = self.add_weight(
                name=f"expert_{name}_kernel",
                shape=(self.num_experts, into, out),
                initializer=_ForEachExpert(self.kernel_initializer, number * self.num_experts),
            )
            setattr(self, f"expert_{name}_kernel", kernel)
            if self.use_bias:
                bias = self.add_weight(
                    name=f"expert_{name}_bias", shape=(self.num_experts, out), initializer=self.bias_initializer
                )
                setattr(self, f"expert_{name}_bias", bias)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})

    def _projections(self) -> tuple[str, ...]:
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def call(self, inputs: Any, mask: Any = None, training: bool | None = None) -> Any:
        """Map `(..., features)` to `(..., features)`."""
        shape = ops.shape(inputs)
        tokens = ops.reshape(inputs, (-1, inputs.shape[-1]))
        logits = ops.matmul(ops.cast(tokens, "float32"), self.router_kernel)
        probabilities = ops.softmax(logits, axis=-1)
        ids = ops.top_k(probabilities, k=self.top_k)[1]
        # The values of top_k by a product, because the gradient of top_k takes a scatter.
        chosen = ops.one_hot(ids, self.num_experts, dtype="float32")
        weights = ops.sum(chosen * ops.expand_dims(probabilities, 1), axis=-1)
        if self.normalize_weights:
            weights = weights / ops.sum(weights, axis=-1, keepdims=True)
        counted = None if mask is None else ops.reshape(ops.cast(mask, "float32"), (-1, 1))
        if training:
            self._add_losses(logits, probabilities, ops.sum(chosen, axis=1) / self.top_k, counted)
        if counted is not None:
            present = ops.cast(counted, ids.dtype)
            ids = ids * present + self.num_experts * (1 - present)
            weights = weights * counted
        outputs = parallel_experts.routed(
            tokens,
            ids,
            weights,
            self.expert_weights,
            self._expert,
            experts=self.num_experts,
            capacity_factor=self.capacity_factor,
            name=self.name,
        )
        return ops.reshape(outputs, shape)

    @property
    def expert_weights(self) -> list[keras.Variable]:
        """The variables `(experts, ...)` of a built layer: the kernel, and perhaps the bias, of each projection."""
        parts = ("kernel", "bias") if self.use_bias else ("kernel",)
        return [getattr(self, f"expert_{name}_{part}") for name in self._projections() for part in parts]

    def _expert(self, rows: Any, weights: list[Any]) -> Any:
        """Compute one expert: `(rows, features)` to `(rows, features)`."""
        given = iter(weights)

        def projected(x: Any) -> Any:
            made = ops.matmul(x, next(given))
            return made + next(given) if self.use_bias else made

        if self.gated:
            gate = self.activation(projected(rows))
            return projected(gate * projected(rows))
        return projected(self.activation(projected(rows)))

    def _add_losses(self, logits: Any, probabilities: Any, chosen: Any, counted: Any) -> None:
        """Add the losses of the router. `counted` is `(tokens, 1)`, 0 for masked tokens; None without a mask."""
        weight = 1.0 if counted is None else counted / ops.maximum(ops.mean(counted), 1e-9)
        if self.load_balancing:
            shares = ops.mean(chosen * weight, axis=0) * ops.mean(probabilities * weight, axis=0)
            self.add_loss(self.load_balancing * self.num_experts * ops.sum(shares))
        if self.router_z:
            squares = ops.square(ops.logsumexp(logits, axis=-1, keepdims=True))
            self.add_loss(self.router_z * ops.mean(squares * weight))

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the shape of the inputs."""
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_experts": self.num_experts,
            "hidden_dim": self.hidden_dim,
            "top_k": self.top_k,
            "activation": keras.activations.serialize(self.activation),
            "gated": self.gated,
            "use_bias": self.use_bias,
            "capacity_factor": self.capacity_factor,
            "normalize_weights": self.normalize_weights,
            "load_balancing": self.load_balancing,
            "router_z": self.router_z,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "router_initializer": keras.initializers.serialize(self.router_initializer),
        }


class _ForEachExpert(keras.initializers.Initializer):  # type: ignore[misc]
    """Draws the kernel `(in, out)` of each expert with an initializer of one kernel.

    Args:
        initializer: The initializer of one kernel.
        first: A number to add to the seed. The kernels of a layer have different numbers.
    """

    def __init__(self, initializer: keras.initializers.Initializer, first: int):
        self._initializer, self._first = initializer, first

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        experts, *of_one = shape
        return ops.stack([self._of_expert(number)(of_one, dtype=dtype) for number in range(experts)])

    def _of_expert(self, number: int) -> Any:
        seed = getattr(self._initializer, "seed", None)
        if not isinstance(seed, int):
            return self._initializer
        # An initializer with a seed draws the same values at each call.
        made = copy.copy(self._initializer)
        made.seed = seed + self._first + number
        return made


def _is_number(value: Any, *, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least


def _is_ours(layer: keras.Layer) -> bool:
    return isinstance(layer, MixtureOfExperts)


def _mixture_of(layer: keras.Layer) -> parallel_experts.Mixture | None:
    if not isinstance(layer, MixtureOfExperts) or not layer.built:
        return None
    return parallel_experts.Mixture(
        name=layer.path,
        variables=layer.expert_weights,
        multiplied=layer.router_kernel,
        choices=layer.top_k,
        width=layer.router_kernel.shape[0],
        dtype=layer.compute_dtype,
        capacity_factor=layer.capacity_factor,
        # With load balancing: the number of tokens, and the sums for shares and mean probabilities of experts. With the
        # z-loss: the number of tokens, and the sum of squares.
        sums=3 * bool(layer.load_balancing) + 2 * bool(layer.router_z),
    )


parallel_experts.known_layers.append(_is_ours)
parallel_experts.finders.append(_mixture_of)

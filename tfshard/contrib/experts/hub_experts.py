"""The experts of KerasHub's models: Mixtral, Qwen MoE, Qwen3 MoE, Qwen3.5 MoE and GPT-OSS.

A block of these models calls a bank of experts, which computes all experts for all tokens, `(experts, tokens, width)`.
The block multiplies the results by the weights `(experts, tokens, 1)` of its router, and sums over the experts. Most
weights are zero. A patch makes the bank return `RoutedResults` in place of the results. Their product with the weights
sends each token to the experts with the largest weights, and gives the sum `(1, tokens, width)`. The router and the
losses stay KerasHub's. To compute one expert, tfshard calls the bank with the weights of this expert only.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.contrib.experts import parallel_experts
from tfshard.errors import UnsupportedOperationError
from tfshard.operations import layer_patch
from tfshard.storage import steps
from tfshard.training import attached_model

ROUTED = layer_patch.register(
    layer_patch.Change(
        of="KerasHub's experts, with `experts=`",
        attribute="call",
        why="sends tokens to the devices of their experts, where KerasHub computes all experts for all tokens",
        module="hub_experts",
        knows_mesh=True,
    )
)


@dataclasses.dataclass(frozen=True, eq=False)
class RoutedResults:
    """Stands for the results of all experts for all tokens, `(experts, tokens, width)`, which no device computes.

    Attributes:
        bank: The layer with the experts.
        call: The layer's unpatched `call`.
        tokens: `(tokens, width)`.
        choices: The number of experts of a token.
    """

    bank: keras.Layer
    call: Callable[[tf.Tensor], tf.Tensor]
    tokens: tf.Tensor
    choices: int

    def __mul__(self, weights: tf.Tensor) -> tf.Tensor:
        """Multiply by the weights `(experts, tokens, 1)` of a router. Returns the sum over experts, with a first dim of
        size 1."""
        variables = self.bank.variables
        experts = variables[0].shape[0]
        count = self.tokens.shape[0]
        if tuple(weights.shape) != (experts, count, 1):
            self._refuse(f"a product with a tensor of shape {tuple(weights.shape)}")
        by_token = tf.transpose(tf.squeeze(weights, 2))
        chosen, ids = tf.math.top_k(by_token, self.choices)
        routed = parallel_experts.routed(
            self.tokens,
            ids,
            chosen,
            variables,
            _expert_of(self.bank, self.call, variables),
            experts=experts,
            name=self.bank.name,
        )
        return tf.expand_dims(routed, 0)

    __rmul__ = __mul__

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        del dtype, name
        self._refuse("a use of the results of all experts")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedOperationError(
            "KerasHub's blocks multiply the results of all experts by the weights of a router, and tfshard computes "
            "the product. This version of KerasHub does something else. Leave out experts=. Received: "
            f"{what} of layer '{self.bank.name}' (of type {type(self.bank).__name__})"
        )


def _expert_of(
    bank: keras.Layer, call: Callable[[tf.Tensor], tf.Tensor], variables: list[keras.Variable]
) -> parallel_experts.Expert:
    """Return the function of one expert of a bank."""
    if type(bank).__name__ == "GptOssExperts":
        names = [variable.name for variable in variables]
        return lambda tokens, weights: _gpt_oss_expert(bank, tokens, dict(zip(names, weights, strict=True)))
    return functools.partial(_one_expert, call, variables)


def _gpt_oss_expert(bank: keras.Layer, tokens: tf.Tensor, weights: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the result of one GPT-OSS expert.

    The result is that of `GptOssExperts.call`, whose clips and slices have gradients that use the number of tokens.
    """
    kernel, bias = weights["gate_up_proj"], weights["gate_up_proj_bias"]
    gate = tf.nn.bias_add(tf.matmul(tokens, kernel[:, ::2]), bias[::2])
    up = tf.nn.bias_add(tf.matmul(tokens, kernel[:, 1::2]), bias[1::2])
    hidden = _gated(bank.alpha, bank.limit)(gate, up)
    return tf.nn.bias_add(tf.matmul(hidden, weights["down_proj"]), weights["down_proj_bias"])


def _gated(alpha: float, limit: float) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Return the activation of GPT-OSS: `(up + 1) * gate * sigmoid(alpha * gate)` of values clipped to the limit."""

    def gated(gate: tf.Tensor, up: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tuple[tf.Tensor, tf.Tensor]]]:
        small_gate, small_up = tf.minimum(gate, limit), tf.clip_by_value(up, -limit, limit)
        share = tf.sigmoid(alpha * small_gate)

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            slope = share * (1 + alpha * small_gate * (1 - share)) * tf.cast(gate <= limit, gate.dtype)
            passes = tf.cast(tf.abs(up) <= limit, up.dtype)
            return upstream * (small_up + 1) * slope, upstream * small_gate * share * passes

        return (small_up + 1) * small_gate * share, gradient

    activation: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] = tf.custom_gradient(gated)
    return activation


def _one_expert(
    call: Callable[[tf.Tensor], tf.Tensor],
    variables: list[keras.Variable],
    tokens: tf.Tensor,
    weights: list[tf.Tensor],
) -> tf.Tensor:
    """Call a bank with the weights of one expert. Returns `(tokens, new width)`."""
    with keras.StatelessScope() as scope:
        for variable, each in zip(variables, weights, strict=True):
            scope.add_update((variable, tf.expand_dims(each, 0)))
        return tf.unstack(call(tokens), 1)[0]


def _replacement(bank: keras.Layer, choices: int, call: layer_patch.Method) -> layer_patch.Method:
    """Return the patched `call` of a bank."""

    def routed(hidden_states: tf.Tensor) -> Any:
        step = steps.current()
        if step is None or steps.is_local_trace():
            return call(hidden_states)
        return RoutedResults(bank, call, hidden_states, choices)

    return routed


def _bank_of(block: keras.Layer) -> keras.Layer | None:
    """Return the bank of experts of a block."""
    banks = [
        value for value in vars(block).values() if isinstance(value, keras.Layer) and _private.is_expert_bank(value)
    ]
    return banks[0] if len(banks) == 1 and isinstance(getattr(block, "top_k", None), int) else None


def install(model: keras.Model) -> None:
    """Patch the banks of a model whose experts are sharded."""
    for block in _private.flatten_layers(model):
        bank = _bank_of(block)
        if bank is not None and parallel_experts.are_shared(bank.variables):
            layer_patch.apply(ROUTED, bank, functools.partial(_replacement, bank, block.top_k))


def _mixture_of(block: keras.Layer) -> parallel_experts.Mixture | None:
    bank = _bank_of(block)
    if bank is None or not bank.built:
        return None
    has_loss = any(hasattr(block, name) for name in ("router_aux_loss_coef", "router_aux_loss_coefficient"))
    return parallel_experts.Mixture(
        name=bank.path,
        variables=bank.variables,
        multiplied=bank.variables[0],
        choices=block.top_k,
        width=bank.variables[0].shape[1],
        dtype=bank.compute_dtype,
        # The sums for the shares of experts and for their mean probabilities, and the number of tokens for each.
        sums=4 * has_loss,
    )


parallel_experts.known_layers.append(_private.is_expert_bank)
parallel_experts.finders.append(_mixture_of)
attached_model.model_patchers.append(install)

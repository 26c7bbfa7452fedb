"""Train the GPT-2 of a size with JAX on one device, and print a line of JSON for each size.

    python tools/gpu/quarter/on_jax.py 124M 350M

Weights and Adam are float32, products and activations bfloat16. The blocks are a `scan`; attention is cuDNN's on a GPU.
"""

import functools
import json
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import sizes  # noqa: E402

_WARMUP, _STEPS = 3, 10


def measure(size: sizes.Size, steps: int) -> dict[str, Any]:
    """Train, and return the median step time as a speed."""
    import jax
    import jax.numpy as jnp
    import optax

    width, heads = size.width, size.heads
    on_gpu = jax.default_backend() == "gpu"
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def drawn(*shape: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), shape)

    weights = {
        "tokens": drawn(size.vocabulary, width),
        "positions": drawn(size.length, width),
        "norm": jnp.ones(width),
        "blocks": {
            "qkv": drawn(size.layers, width, 3 * width), "out": drawn(size.layers, width, width),
            "up": drawn(size.layers, width, 4 * width), "down": drawn(size.layers, 4 * width, width),
            "norm1": jnp.ones((size.layers, width)), "norm2": jnp.ones((size.layers, width)),
        },
    }  # fmt: skip
    optimizer = optax.adam(1e-3)

    def normed(x: Any, scale: Any) -> Any:
        x = x.astype(jnp.float32)
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return (x * scale).astype(jnp.bfloat16)

    def block(x: Any, w: Any) -> tuple[Any, None]:
        w = {name: value if name.startswith("norm") else value.astype(jnp.bfloat16) for name, value in w.items()}
        q, k, v = jnp.split((normed(x, w["norm1"]) @ w["qkv"]).reshape(*x.shape[:2], heads, -1), 3, -1)
        attended = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn" if on_gpu else None
        ).reshape(x.shape)
        x = x + attended @ w["out"]
        return x + jax.nn.gelu(normed(x, w["norm2"]) @ w["up"]) @ w["down"], None

    def loss(w: Any, tokens: Any) -> Any:
        x = (w["tokens"][tokens] + w["positions"]).astype(jnp.bfloat16)
        x, _ = jax.lax.scan(block, x, w["blocks"])
        logits = (normed(x, w["norm"]) @ w["tokens"].astype(jnp.bfloat16).T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w: Any, state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(w, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(w, updates), state, value

    tokens = jax.random.randint(next(keys), (size.batch, size.length), 0, size.vocabulary)
    state, times = optimizer.init(weights), []
    for _ in range(_WARMUP + steps):
        begin = time.perf_counter()
        weights, state, value = step(weights, state, tokens)
        found = float(value)
        times.append(time.perf_counter() - begin)
    return {
        "version": jax.__version__,
        **sizes.speed(size, statistics.median(times[_WARMUP:])),
        "first_step_seconds": round(times[0], 1),
        "loss": round(found, 4),
    }


def main(names: list[str]) -> None:
    try:
        import jax  # noqa: F401
        import optax  # noqa: F401
    except ImportError as error:
        print(json.dumps({"skipped": f"JAX: {error}"}))
        return
    for name in names:
        steps = 2 if name == "tiny" else _STEPS
        print(json.dumps({"size": name, "way": "JAX", **measure(sizes.SIZES[name], steps)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

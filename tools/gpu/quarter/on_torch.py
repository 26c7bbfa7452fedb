"""Train the GPT-2 of a size with PyTorch on one device, and print a line of JSON for each size.

    python tools/gpu/quarter/on_torch.py 124M 350M

Weights and Adam are float32, products and activations bfloat16 (autocast). `torch.compile` compiles each block once,
and the loss; attention is PyTorch's scaled_dot_product_attention.
"""

import json
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import sizes  # noqa: E402

_WARMUP, _STEPS = 3, 10


def build(size: sizes.Size) -> Any:
    """Return a module from tokens to the mean loss."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = size.width
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            samples, length, width = x.shape
            qkv = self.qkv(self.norm1(x)).view(samples, length, 3, size.heads, width // size.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = (
                nn.Embedding(size.vocabulary, size.width),
                nn.Embedding(size.length, size.width),
            )
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.blocks = nn.ModuleList([Block() for _ in range(size.layers)])
            self.norm = nn.LayerNorm(size.width)
            for block in self.blocks:
                block.compile()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.positions.weight
            for block in self.blocks:
                x = block(x)
            return self.loss(self.norm(x), tokens)

        @torch.compile
        def loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            logits = functional.linear(x, self.tokens.weight)
            return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    return GPT()


def measure(size: sizes.Size, steps: int) -> dict[str, Any]:
    """Train, and return the median step time as a speed."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build(size).to(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=device == "cuda")
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length), device=device)
    times = []
    for _ in range(_WARMUP + steps):
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = float(loss.detach())
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {
        "version": torch.__version__,
        **sizes.speed(size, statistics.median(times[_WARMUP:])),
        "first_step_seconds": round(times[0], 1),
        "loss": round(found, 4),
        **({"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3)} if device == "cuda" else {}),
    }


def main(names: list[str]) -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        print(json.dumps({"skipped": f"PyTorch: {error}"}))
        return
    for name in names:
        steps = 2 if name == "tiny" else _STEPS
        print(json.dumps({"size": name, "way": "torch.compile", **measure(sizes.SIZES[name], steps)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

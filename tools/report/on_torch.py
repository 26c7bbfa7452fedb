"""Train a model of the report with PyTorch's FSDP2, and serve the measurements (tools/report/serving.py).

    python -m tools.report.on_torch --model='{"kind": "gpt", ...}' --devices=4

tools/report/__main__.py starts this program, in PyTorch's environment. Each device has a process. The model is created
on the meta device and sharded block by block (`fully_shard`). Its values are drawn in shards. Collectives use gloo.
`--way="torch, one device"` runs one process without FSDP2.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from tools.bench import common
from tools.report import models, resident, serving


class Recurrent(nn.Module):
    """An embedding table, LSTM layers, and a head of two classes."""

    def __init__(self, model: models.Model):
        super().__init__()
        self.table = nn.Embedding(model.vocabulary, model.width)
        self.blocks = nn.ModuleList([nn.LSTM(model.width, model.width, batch_first=True) for _ in range(model.layers)])
        self.last = nn.Linear(model.width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.last(x[:, -1])


def build(model: models.Model) -> tuple[nn.Module, list[nn.Module]]:
    """Return the model, and its modules that FSDP2 unshards one after the other."""
    if model.kind == "lstm":
        made = Recurrent(model)
        return made, list(made.blocks)
    import transformers

    if model.kind == "resnet":  # The default configuration is ResNet50.
        made = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=model.vocabulary))
        return made, [layer for stage in made.resnet.encoder.stages for layer in stage.layers]
    if model.kind == "efficientnet":
        made = transformers.EfficientNetForImageClassification(
            transformers.EfficientNetConfig(
                width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, dropout_rate=0.0, drop_connect_rate=0.0,
                image_size=model.length, num_labels=model.vocabulary,
            )
        )  # fmt: skip
        return made, list(made.efficientnet.encoder.blocks)
    if model.kind == "gpt":
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=model.vocabulary, n_positions=model.length, n_embd=model.width, n_layer=model.layers,
                n_head=model.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )
        )  # fmt: skip
        return made, list(made.transformer.h)
    if model.kind == "bert":
        made = transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=model.vocabulary, hidden_size=model.width, num_hidden_layers=model.layers,
                num_attention_heads=model.heads, intermediate_size=4 * model.width, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0, max_position_embeddings=model.length,
            )
        )  # fmt: skip
        return made, list(made.bert.encoder.layer)
    made = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=model.vocabulary, hidden_size=model.width, intermediate_size=2 * model.width,
            num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.heads,
            num_local_experts=models.EXPERTS, num_experts_per_tok=models.CHOSEN, use_cache=False,
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    return made, list(made.model.layers)


def logits_of(outputs: Any) -> torch.Tensor:
    """Return the logits of a transformers output, or of a tensor."""
    return outputs if torch.is_tensor(outputs) else outputs.logits


def born(model: models.Model, sharded: bool) -> nn.Module:
    """Create a model with values. No process ever holds all values of a sharded model."""
    torch.manual_seed(0)
    if not sharded:
        return build(model)[0]
    with torch.device("meta"):
        made, blocks = build(model)
    for block in blocks:
        fully_shard(block)
    fully_shard(made)
    made.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.constant_(parameter, float("norm" in name or "ln_" in name or "bn" in name))
        for name, buffer in made.named_buffers():
            _fill(made, name, buffer, model)
    return made


def _fill(made: nn.Module, name: str, buffer: torch.Tensor, model: models.Model) -> None:
    """Fill a buffer that the constructor of a module sets, and that to_empty() has cleared."""
    if "running_var" in name:
        buffer.fill_(1.0)
    elif "position_ids" in name:
        buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape))
    elif "inv_freq" in name:
        width = model.width // model.heads
        buffer.copy_(1.0 / (1e6 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)))
    elif buffer.dtype == torch.bool:
        buffer.copy_(torch.ones(buffer.shape, dtype=torch.bool).tril())
    else:
        buffer.zero_()


def run(rank: int, arguments: argparse.Namespace, port: int, asked: Any) -> None:
    """Run the process of one device: answer questions from the pipe until the pipe is closed."""
    devices, model = arguments.devices, models.Model(**json.loads(arguments.model))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // devices))
    sharded = arguments.way == "FSDP2"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sharded:
        dist.init_process_group("gloo", rank=rank, world_size=devices)
        dist.all_reduce(torch.zeros(1))
    made = functools.cache(lambda: Steps(model, rank, devices, sharded, model.steps))

    def memory() -> dict[str, Any]:
        Steps(models.tiny(model), rank, devices, sharded, 2)()
        before = resident.now()
        steps = Steps(model, rank, devices, sharded, 2)
        steps()
        return resident.between_and_at_peak(steps, before, 1)

    answers = {
        "first": lambda: {"first": made().first(), "parameters": made().parameters},
        "epoch": lambda: {"steps": made().times()},
        "sent": lambda: _sent(made()),
        "memory": memory,
    }
    with contextlib.suppress(EOFError):  # The asking process has ended.
        while True:
            asked.send(answers[asked.recv()]())


class Steps:
    """The share of an epoch that one process trains.

    Attributes:
        ends: The time at the end of each step of the last epoch.
        parameters: The number of parameters of the full model.
    """

    def __init__(self, model: models.Model, rank: int, devices: int, sharded: bool, count: int):
        x, y = models.data(model, count)
        if model.kind in ("resnet", "efficientnet"):
            x = x.transpose(0, 3, 1, 2)
        share = model.batch // devices
        mine = [
            slice(step * model.batch + rank * share, step * model.batch + (rank + 1) * share) for step in range(count)
        ]
        self.batches = [(torch.tensor(x[rows]), torch.tensor(y[rows]).long()) for rows in mine]
        self.model = born(model, sharded)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.ends: list[float] = []
        self.parameters = sum(each.numel() for each in self.model.parameters())

    def first(self) -> float:
        """Train the first epoch. Returns the seconds to the end of its first step, without the model's creation."""
        begin = time.perf_counter()
        self()
        return self.ends[0] - begin

    def times(self) -> list[float]:
        """Train an epoch, and return the seconds of its steps but the first."""
        self()
        return common.step_times(self.ends)

    def __call__(self) -> None:
        self.ends = []
        for x, y in self.batches:
            logits = logits_of(self.model(x if x.is_floating_point() else x.long()))
            loss = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            float(loss)
            self.ends.append(time.perf_counter())


def _sent(steps: Steps) -> dict[str, int]:
    """Return the number of collectives of a step, and the bytes of the full tensors that they gather or reduce."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        steps()
    found = [event for event in profile.events() if event.name.startswith("c10d::")]
    floats = sum(max((math.prod(shape) for shape in event.input_shapes if shape), default=0) for event in found)
    count = len(steps.batches)
    return {"collectives": len(found) // count, "bytes": 4 * floats // count}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--way", default="FSDP2")
    parser.add_argument("--devices", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.way != "FSDP2":
        arguments.devices = 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    pipes = []
    for rank in range(arguments.devices):
        ours, theirs = context.Pipe()
        context.Process(target=run, args=(rank, arguments, port, theirs), daemon=True).start()
        theirs.close()  # An open copy here would keep the pipe open after the process has died.
        pipes.append(ours)

    def answer(question: str) -> dict[str, Any]:
        for pipe in pipes:
            pipe.send(question)
        found = [pipe.recv() for pipe in pipes]
        highest = {name: max(each[name] for each in found) for name in ("rests", "peak") if name in found[0]}
        return {**found[0], **highest, "versions": f"PyTorch {torch.__version__}"}

    serving.serve({name: functools.partial(answer, name) for name in ("first", "epoch", "sent", "memory")})


if __name__ == "__main__":
    main()

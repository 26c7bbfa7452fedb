"""Check `scaling`: the step time of three small models on some of the devices, and the efficiency."""

import pathlib
import statistics
import time

import keras

import tfshard
from tfshard import _private, collectives
from tfshard.devices import startup
from tfshard.doctor import small_models
from tfshard.doctor.check_log import CheckLog, CheckRequest

_WARMUP, _STEPS = 3, 10
_TABLE = "Step time"


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Time steps with the same samples on each device. The efficiency compares with the request's baseline."""
    devices = started.num_devices
    base = _samples_per_second(request.baseline)
    times, efficiencies = [], []
    for name in small_models.MODELS:
        seconds = _step_seconds(name, devices)
        times.append(1e3 * seconds)
        rate = small_models.SAMPLES * devices / seconds
        efficiency = rate / (devices * base[name]) if name in base else None
        efficiencies += [efficiency] if efficiency is not None else []
        log.row(
            _TABLE, model=name, devices=devices, ms=times[-1], **{"samples/s": rate},
            efficiency="" if efficiency is None else f"{efficiency:.0%}",
        )  # fmt: skip
    text = f", efficiency {min(efficiencies):.0%} to {max(efficiencies):.0%}" if efficiencies else ""
    log.summarize(f"steps of {', '.join(f'{each:.1f}' for each in times)} ms{text}")


def _samples_per_second(folder: str | None) -> dict[str, float]:
    """Return the samples per second of each model in the baseline, which ran on one device."""
    rows = CheckLog.read(pathlib.Path(folder)).tables.get(_TABLE, ()) if folder else ()
    return {str(row["model"]): float(row["samples/s"] or 0) for row in rows}


def _step_seconds(name: str, devices: int) -> float:
    """Return the median time of a training step at ZeRO stage 3, the slowest client's."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model, batch = small_models.MODELS[name](devices)
    model = tfshard.as_distributed(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=devices), zero_stage=3)
    model.compile("adam", loss, strategy=strategy)
    seconds = []
    for _ in range(_WARMUP + _STEPS):
        begin = time.perf_counter()
        model.train_on_batch(*batch)
        _private.wait_for_devices()
        seconds.append(time.perf_counter() - begin)
    return float(collectives.all_reduce(statistics.median(seconds[_WARMUP:]), "max"))

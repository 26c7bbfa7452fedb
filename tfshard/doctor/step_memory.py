"""Check `peak-memory`: the peak of a step beside the plan's prediction."""

import keras
import tensorflow as tf

import tfshard
from tfshard import tables
from tfshard.devices import startup
from tfshard.doctor import large_layers
from tfshard.doctor.check_log import CheckLog, CheckRequest
from tfshard.doctor.small_models import Batch
from tfshard.planning import peak

_STAGES, _TRIES = (0, 3), 3


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Measure the peak at some ZeRO stages. A peak above the plan's peak and its margin is a fault."""
    del request
    texts = []
    for stage in _STAGES:
        strategy, model, batch = large_layers.compiled(started.num_devices, stage)
        planned = strategy.plan(model, inputs=batch[0]).peak
        assert planned is not None  # The plan has inputs.
        largest = peak.with_margin(planned.peak_bytes, recompute=False) + planned.overlap_bytes
        measured = _measure(started, model, batch, largest)
        log.row(
            "Peak of a device", stage=stage, planned=tables.size(planned.peak_bytes),
            measured="unknown" if measured is None else tables.size(measured),
            ratio="" if measured is None else f"{measured / planned.peak_bytes:.2f}",
        )  # fmt: skip
        if measured is None:
            log.note(f"The allocator does not report the peak at ZeRO stage {stage}.")
            continue
        texts.append(f"{measured / planned.peak_bytes:.2f} at stage {stage}")
        # On one device, measured peaks are above the plan's (benchmarks/LOG.md, "Checks of all devices").
        if measured > largest and started.num_devices > 1:
            log.fault(
                f"At ZeRO stage {stage}, a device has {tables.size(measured)} at the peak of a step. The plan predicts "
                f"{tables.size(planned.peak_bytes)}, and at most {tables.size(largest)}."
            )
    log.summarize(f"measured / planned: {', '.join(texts) or 'unknown'}")


def _measure(started: startup.Runtime, model: keras.Model, batch: Batch, largest: int) -> int | None:
    """Return the smallest peak of some steps, or of the first step with at most `largest` bytes.

    On a busy machine, a device waits for others, and its gradients live longer.
    """
    peaks = []
    for _ in range(_TRIES):
        _reset(started)
        measured = _measured(started, tfshard.profile_step(model, batch))
        if measured is None or measured <= largest:
            return measured
        peaks.append(measured)
    return min(peaks)


def _reset(started: startup.Runtime) -> None:
    # Not run: needs GPUs.
    if started.device_type == "GPU":
        for device in range(started.local_devices):
            tf.config.experimental.reset_memory_stats(f"GPU:{device}")


def _measured(started: startup.Runtime, profile: tfshard.measure.StepProfile) -> int | None:
    """Return the bytes of the fullest local device at the peak, or None if the allocator does not report."""
    if started.device_type == "GPU":
        # Not run: needs GPUs. The peak of the steps before the traced step counts too.
        devices = range(started.local_devices)
        return max(int(tf.config.experimental.get_memory_info(f"GPU:{device}")["peak"]) for device in devices)
    if profile.peak is None or not profile.peak.device_added:
        return None
    return max(profile.variable_bytes.values()) + profile.peak.device_added

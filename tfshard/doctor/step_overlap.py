"""Check `overlap`: how much of a step's communication runs beside computation, from a trace."""

import tfshard
from tfshard.devices import startup
from tfshard.doctor import large_layers
from tfshard.doctor.check_log import CheckLog, CheckRequest

_STAGES = (2, 3)


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Trace a step at some ZeRO stages. Nothing is a fault: the numbers depend on the machine."""
    del request
    texts = []
    for stage in _STAGES:
        _, model, batch = large_layers.compiled(started.num_devices, stage)
        profile = tfshard.profile_step(model, batch)
        cells = {"collectives": profile.count(), "step ms": 1e3 * profile.seconds}
        if profile.timeline is None:
            log.note(f"The trace at ZeRO stage {stage} does not tell devices apart, as on GPUs.")
            cells["collective ms"] = 1e3 * profile.collective_seconds()
        else:
            cells["collective ms"] = 1e3 * profile.timeline.collective_seconds
            cells["waiting ms"] = 1e3 * profile.timeline.waiting_seconds
            cells["computing ms"] = 1e3 * profile.timeline.computing_seconds
        hidden = "unknown" if profile.hidden is None else f"{profile.hidden:.0%}"
        texts.append(f"{hidden} at stage {stage}")
        log.row("Overlap", stage=stage, hidden=hidden, **cells)
    log.summarize(f"hidden: {', '.join(texts)}")

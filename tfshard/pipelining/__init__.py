"""How does a model go over devices that have other layers?

Read `models` first, where `pipeline` is, then `pipeline`.

    models          `pipeline`: a model whose steps are done by one
    plans           what a pipeline stores, sends and waits for; what was measured
    pipeline        `Pipeline`: the parts on their ranks, and a step
    cut             where a model is cut, and what goes from part to part
    schedules       in which order the ranks do what: gpipe, 1f1b, interleaved
    runner          the tasks of a step, done by a thread for each rank
    part_functions  what is compiled for a part and for a rank
    ranks           variables on the meshes of their parts, mirrors of those that several have
    divisors        by what the losses of a whole batch are divided
"""

from tfshard.pipelining.models import pipeline
from tfshard.pipelining.plans import PipelinePlan, is_pipeline, measured, plan, reports

__all__ = ["PipelinePlan", "is_pipeline", "measured", "pipeline", "plan", "reports"]

"""Pipeline parallelism: groups of devices compute different layers of a model.

Read `models` first, where `pipeline` is, then `pipeline`.

    models          `pipeline`: makes a model train on a pipeline
    plans           what a pipeline stores, sends and waits for, predicted and measured
    pipeline        `Pipeline`: the stages on their pipeline ranks, and a step
    predictions     the memory and the time of a pipelined step, for `advise` and `simulate`
    cut             cuts a model into stages, and lists the tensors between stages
    schedules       the order of tasks on each pipeline rank: gpipe, 1f1b, interleaved
    runner          runs the tasks of a step in a thread for each pipeline rank
    stage_functions  the compiled functions of a stage and of a pipeline rank
    ranks           variables on the meshes of their stages, and mirrors of shared variables
    divisors        the divisors of the losses of a full batch
"""

from tfshard.contrib.pipeline import predictions as _predictions  # Registers itself.
from tfshard.contrib.pipeline.models import pipeline
from tfshard.contrib.pipeline.plans import PipelinePlan, is_pipeline, measured, plan, reports

__all__ = ["PipelinePlan", "is_pipeline", "measured", "pipeline", "plan", "reports"]

del _predictions

"""Plans and measurements of a pipelined model; see `tfshard.contrib.pipeline`."""

from tfshard.contrib.pipeline import PipelinePlan, is_pipeline, measured, pipeline, plan, reports

__all__ = ["PipelinePlan", "is_pipeline", "measured", "pipeline", "plan", "reports"]

"""Compute the losses of a model, on any backend."""

from typing import Any

from tools.report import models


def of(compiled: Any, model: models.Model, steps: int) -> list[float]:
    """Return the loss of each batch, in one pass over the data."""
    x, y = models.data(model, steps)
    rows = range(0, len(x), model.batch)
    return [float(compiled.train_on_batch(x[i : i + model.batch], y[i : i + model.batch])) for i in rows]

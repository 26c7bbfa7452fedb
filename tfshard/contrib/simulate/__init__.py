"""Predict the step time and memory of clusters that you do not have, and calibrate the prediction on devices.

simulation   `simulate`: the best mesh and stage of a model on a machine, by the predicted time of a step
calibration  `calibrate`: measures what devices take for the work of a step
"""

from tfshard.contrib.simulate.calibration import calibrate
from tfshard.contrib.simulate.simulation import Prediction, Simulation, simulate

__all__ = ["Prediction", "Simulation", "calibrate", "simulate"]

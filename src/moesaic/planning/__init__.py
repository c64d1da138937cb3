"""`plan`: sizes and costs of checkpoints and recipes from headers and configs alone. Imports no torch."""

from moesaic.families.counting import ParameterCount, count_parameters
from moesaic.planning.report import PlanReport
from moesaic.planning.run import plan

__all__ = ["ParameterCount", "PlanReport", "count_parameters", "plan"]

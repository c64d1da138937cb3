"""`plan`: sizes and costs of checkpoints and recipes from headers and configs alone. Imports no torch."""

from moesaic.families.counting import count_parameters as count_parameters

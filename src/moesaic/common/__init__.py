"""The ground floor: errors, recipes, progress, seeds. Nothing here knows a model or a checkpoint."""

"""The lab: the papers' claims as experiments, each a graph of ordinary verbs with recipes that it writes itself.

`experiments/` say which steps there are and what their numbers mean, `plan.py` writes them down, `workflow.py` lets
Snakemake run them, `results.py` reads what the runs left, `claims.py` judges it. Nothing here trains, routes or scores.
"""

"""Tables over several runs: results of `moesaic eval` and training runs, with intervals. Torch-free."""

"""Evaluation of checkpoints: benchmarks through lm-eval, held-out perplexity, and the tables over them."""

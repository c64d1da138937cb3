"""Growing a trained MoE by duplicating experts (Expert Upcycling, arXiv 2604.19835)."""
